"""The MACE comparison: equal loads, figures that add up, and a page that shows all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.bench.mace import (
    FIFO_SEQUENCES,
    FIFO_VARIANTS,
    SCALES,
    VARIANTS,
    Load,
    load_of,
    run_variant,
)
from tandem.cli.mace import make_engine
from tandem.cli.simulate import load_profile
from tandem.core.request import Request

SMALL = replace(SCALES[0], rate=4.0, duration_s=5.0, pair_tokens=64)
PROFILE = load_profile(SMALL.profile)
BUSY = replace(SMALL, rate=40.0, duration_s=4.0)


def test_the_load_is_the_same_for_everybody_and_only_jobs_depend_on_the_rate():
    first, none = load_of(SMALL, PROFILE, 0.0, 1)
    second, some = load_of(SMALL, PROFILE, 0.5, 1)
    requests = [arrival for arrival in second if isinstance(arrival.work, Request)]
    assert requests == first and none == 0
    assert 0 < some == len(second) - len(first) < len(first)


def test_prompts_share_their_beginnings():
    arrivals, _ = load_of(SMALL, PROFILE, 0.0, 1)
    beginnings = {arrival.work.prompt[: SMALL.shared_tokens] for arrival in arrivals}
    assert 1 < len(beginnings) <= SMALL.templates


@pytest.mark.parametrize("variant", [*VARIANTS, FIFO_VARIANTS[-1]], ids=lambda each: each.name)
def test_every_variant_serves_and_trains(variant):
    load = Load(SMALL, PROFILE, 0.5)
    row = run_variant(variant, load, make_engine)
    assert row.unfinished == 0 and row.jobs_done == row.jobs > 0
    assert 0 < row.attainment <= 1 and 0 < row.utilisation < 1
    assert 0 < row.ttft_s <= row.ttft_p95_s and row.tbt_s > 0 and row.fine_tune_s > 0
    requests = [each.at_s for each in load_of(SMALL, PROFILE, 0.5, 0)[0]]
    assert max(requests) < row.last_s
    assert run_variant(variant, load, make_engine) == row


@pytest.mark.parametrize("variant", FIFO_VARIANTS, ids=lambda each: each.name)
def test_in_order_of_arrival_everybody_has_the_same_limits(variant):
    engine = make_engine(variant, PROFILE)
    Load(BUSY, PROFILE, 0.3).meet(engine)
    sequences = [moment.decodes for moment in engine.timeline.moments]
    assert 45 <= max(sequences) <= FIFO_SEQUENCES


def test_only_the_hybrid_of_figure_13_trains_beside_answers():
    """All else equal, it needs fewer iterations for the same work."""
    mixed, found = {}, {}
    for variant in FIFO_VARIANTS:
        if variant.policy == "mace":
            engine = make_engine(variant, PROFILE)
            Load(BUSY, PROFILE, 0.3).meet(engine)
            moments = engine.timeline.moments
            mixed[variant.name] = sum(1 for each in moments if each.decodes and each.training)
            found[variant.name] = len(moments)
    assert mixed["mace/bin"] == 0 < mixed["mace/fifo"]
    assert found["mace/fifo"] < found["mace/bin"]
