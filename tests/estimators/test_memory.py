"""What online requests will hold: a window of samples, and how far off its mean was."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.estimators.memory import DemandWindow, Growing, peak_tokens


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


@settings(max_examples=100, deadline=None)
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
    first, second = Growing(50.0, [(50.0, 1.0)]), Growing(10.0, [(120.0, 1.0)])
    assert peak_tokens([first, second]) == 160.0
    assert peak_tokens([first]) == 100.0
    assert peak_tokens([]) == 0.0
    assert peak_tokens([Growing(7.0), first]) == 107.0, "nothing is known of it"


GROWING = st.builds(
    lambda now, ends: Growing(
        now, [(float(place), 1.0 / len(ends)) for place in sorted(ends)] if ends else ()
    ),
    st.floats(0.0, 100.0),
    st.lists(st.integers(1, 30), max_size=4),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(GROWING, max_size=6))
def test_the_peak_is_the_most_of_mean_and_two_deviations_over_all_times(sequences):
    found = [sum(each.now for each in sequences)]
    for more in range(1, 31):
        mean = variance = 0.0
        for each in sequences:
            alive = sum(share for end, share in each.ends if end >= more) if each.ends else 1.0
            holds = each.now + more if each.ends else each.now
            mean += alive * holds
            variance += alive * (1.0 - alive) * holds**2
        found.append(mean + 2.0 * math.sqrt(max(0.0, variance)))
    assert peak_tokens(sequences) == pytest.approx(max(found), abs=1e-3)
