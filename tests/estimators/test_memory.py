"""What online requests will hold: a window of samples, and how far off its mean was."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.estimators.memory import DemandWindow, Growing, Peak, table_of


def test_demand_is_the_mean_and_two_deviations_of_the_window():
    window = DemandWindow(window_s=100.0, interval_s=1.0)
    assert window.demand == 0.0
    for second in range(1000):
        window.observe(float(second), 10 if second < 900 else (40 if second % 2 else 60))
    assert window.demand == pytest.approx(50.0 + 2.0 * 10.0, abs=1.5)
    assert window.errors.mean > 0.0
    assert not window.due(999.5)
    window.observe(999.5, 10**6)  # too soon after the last one
    assert window.demand < 80.0


@settings(max_examples=100)
@given(
    samples=st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(0, 50)), min_size=1, max_size=40)
)
def test_old_samples_are_forgotten_to_the_last_digit(samples):
    window, now = DemandWindow(window_s=20.0, interval_s=1.0), 0.0
    kept: list[tuple[float, int]] = []
    for pause_s, blocks in samples:
        now += pause_s
        if not kept or now >= kept[-1][0] + 1.0:
            assert window.due(now)
            kept.append((now, blocks))
        window.observe(now, blocks)
    lately = [blocks for at_s, blocks in kept if kept[-1][0] - at_s <= 20.0]
    wanted = statistics.fmean(lately) + 2.0 * statistics.pstdev(lately)
    assert window.demand == pytest.approx(wanted, abs=1e-6)


def test_the_mean_is_judged_by_the_next_sample_unless_that_is_nothing():
    window = DemandWindow(window_s=100.0, interval_s=1.0)
    window.observe(0.0, 10)
    assert window.errors.samples == 0 and math.isnan(window.errors.report().p95)
    window.observe(1.0, 0)
    assert window.errors.samples == 0
    window.observe(2.0, 4)  # 5 was the mean
    found = window.errors.report()
    assert (found.bias, found.mape, found.p95, found.samples) == (0.25, 0.25, 0.25, 1)


def test_what_ends_frees_its_memory_before_others_are_long():
    """At its end the first holds 100 tokens and the second 60; at its own end the second holds
    130."""
    first = Growing(50.0, 0, table_of([(50.0, 1.0)]))
    second = Growing(10.0, 20, table_of([(140.0, 1.0)]))
    assert Peak([first, second]).tokens_with() == Peak([first]).tokens_with([second]) == 160.0
    assert Peak([first]).tokens_with() == first.most == 100.0
    assert second.most == 130.0
    assert Peak().tokens_with() == 0.0
    assert Peak([Growing(7.0)]).tokens_with([first]) == 107.0, "nothing is known of it"


ENDS = st.lists(st.integers(1, 30), max_size=4).map(
    lambda places: [(float(place), 1.0 / len(places)) for place in sorted(places)]
)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0.0, 100.0), ENDS, st.integers(0, 9)), max_size=6))
def test_the_peak_is_the_most_of_mean_and_two_deviations_over_all_times(sequences):
    found = [sum(now for now, _, _ in sequences)]
    for more in range(1, 31):
        mean = variance = 0.0
        for now, ends, _ in sequences:
            alive = sum(share for end, share in ends if end >= more) if ends else 1.0
            holds = now + more if ends else now
            mean += alive * holds
            variance += alive * (1.0 - alive) * holds**2
        found.append(mean + 2.0 * math.sqrt(max(0.0, variance)))
    growing = [
        Growing(now, made, table_of([(end + made, share) for end, share in ends]) if ends else None)
        for now, ends, made in sequences
    ]
    half = len(growing) // 2
    peak = Peak(growing[:half])
    assert peak.tokens_with(growing[half:]) == pytest.approx(max(found), abs=1e-3)
    peak.add(growing[half:])
    assert peak.tokens_with() == pytest.approx(max(found), abs=1e-3)
