"""The MACE comparison: equal loads, figures that add up, claims that are judged and not assumed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.bench.mace import (
    SCALES,
    VARIANTS,
    Figures,
    as_markdown,
    claims,
    load_of,
    run_variant,
)
from tandem.cli.mace import make_loop
from tandem.cli.simulate import load_profile
from tandem.core.request import Request

SMALL = replace(SCALES[0], rate=4.0, duration_s=5.0, pair_tokens=64)
PROFILE = load_profile(SMALL.profile)


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


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_serves_and_trains(variant):
    row = run_variant(variant, SMALL, PROFILE, 0.5, make_loop)
    assert row.unfinished == 0 and row.jobs_done == row.jobs > 0
    assert 0 < row.attainment <= 1 and 0 < row.utilisation < 1
    assert 0 < row.ttft_s <= row.ttft_p95_s and row.tbt_s > 0 and row.fine_tune_s > 0
    assert run_variant(variant, SMALL, PROFILE, 0.5, make_loop) == row


def row(variant: str, rate: float, **changes: float) -> Figures:
    base = Figures(variant, rate, 1.0, 100.0, 1.0, 2.0, 0.05, 3.0, 0.9, 10, 0.02, 0.3, 4, 4, 0)
    return replace(base, **changes)


def test_claims_hold_only_where_the_figures_say_so():
    names = [variant.name for variant in VARIANTS]
    rows = [row(name, rate) for name in names for rate in (0.0, 0.1)]
    assert [claim.holds for claim in claims(rows)] == [False, False, False, True, True, True]
    better = [
        replace(each, ttft_s=0.3, throughput=150.0) if each.variant in ("mace", "unified")
        else replace(each, attainment=0.2) if each.variant == "mace/bin" else each
        for each in rows
    ]  # fmt: skip
    assert all(claim.holds for claim in claims(better))
    page = as_markdown(SMALL, PROFILE, better)
    assert "| prefill latency below adainf's | 63% | 70% at a retrain rate of 10% | yes |" in page
