"""Rounds: the same loads for everybody, everybody's turn, one row of figures for all of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import groupby
from random import Random

import pytest

from benchmarks.mace.runs import FIFO_VARIANTS, SCALES, VARIANTS, Figures
from benchmarks.mace.sweep import PARTS, SWEEP_RATE, Run, Sweep, grouped, over_rounds, unrest
from tandem.estimators.datasheet import load_profile

SCALE = SCALES[0]
SWEEP = Sweep(SCALE, load_profile(SCALE.profile), (0.0, 0.3), (0.5, 2.0), (0.3,), seed=7, rounds=3)


def figures(run: Run, **changes: object) -> Figures:
    row = Figures(
        run.variant.name, run.load.retrain_rate, run.load.scale.rate, 100.0, 1.0, 2.0, 0.05, 3.0,
        0.9, 10, 0.02, 0.3, 4, 4, 0, 60.0,
    )  # fmt: skip
    return replace(row, **changes)


def test_each_load_is_met_by_all_one_after_the_other():
    runs = [(run.part, run.load, run.variant.name) for run in SWEEP.runs()]
    met = [
        (part, load, [name for *_, name in group])
        for (part, load), group in groupby(runs, key=lambda run: run[:2])
    ]
    assert len(met) == 3 * (2 + 2 + 1)
    for part, _, names in met:
        assert sorted(names) == sorted(variant.name for variant in PARTS[part])
    firsts = Counter(names[0] for part, _, names in met if part == "fifo")
    assert set(firsts.values()) == {1} and len(firsts) == 3


def test_a_round_has_loads_of_its_own_and_the_first_has_the_seeds():
    seeds = [run.load.seed for run in SWEEP.runs()]
    assert seeds == sorted(seeds) and Counter(seeds).keys() == {7, 8, 9}
    assert SWEEP.usual.seed == 7 and SWEEP.usual.retrain_rate == SWEEP_RATE


def test_loads_are_factors_of_the_scales_own():
    rates = {(run.part, run.load.scale.rate, run.load.retrain_rate) for run in SWEEP.runs()}
    own = SCALE.rate
    assert rates == {
        ("rates", own, 0.0), ("rates", own, 0.3), ("fifo", own, 0.3),
        ("loads", 0.5 * own, SWEEP_RATE), ("loads", 2.0 * own, SWEEP_RATE),
    }  # fmt: skip


def test_rows_are_in_the_order_of_the_tables_however_they_were_run():
    done = [(run, figures(run, jobs=number)) for number, run in enumerate(SWEEP.runs())]
    Random(1).shuffle(done)
    groups = grouped(done, "rates")
    assert [len(group) for group in groups] == [3] * len(groups)
    assert [(group[0].retrain_rate, group[0].variant) for group in groups] == [
        (rate, variant.name) for rate in (0.0, 0.3) for variant in VARIANTS
    ]
    assert [group[0].variant for group in grouped(done, "fifo")] == [
        variant.name for variant in FIFO_VARIANTS
    ]


def test_counts_are_added_and_the_rest_are_means_of_what_is_known():
    run = SWEEP.runs()[0]
    row = over_rounds(
        [
            figures(run, iterations=3, ttft_s=1.0, fine_tune_s=math.nan, tbt_s=math.nan),
            figures(run, iterations=5, ttft_s=2.0, fine_tune_s=4.0, tbt_s=math.nan),
        ]
    )
    assert (row.iterations, row.ttft_s, row.fine_tune_s) == (8, 1.5, 4.0)
    assert (row.jobs, row.jobs_done) == (8, 8) and isinstance(row.jobs, int)
    assert math.isnan(row.tbt_s) and row.variant == run.variant.name
    assert row.request_rate == run.load.scale.rate


def test_one_round_is_what_it_was():
    row = figures(SWEEP.runs()[0], throughput=0.1 + 0.2)
    assert over_rounds([row]) == row


def test_rounds_that_differ_are_told():
    run = SWEEP.runs()[0]
    rows = [[figures(run, ttft_s=first), figures(run, ttft_s=1.0)] for first in (1.0, 1.5, 3.0)]
    assert unrest(rows, "ttft_s") == pytest.approx(0.5 / 1.25)
    assert unrest(rows, "throughput") == 0.0
    assert math.isnan(unrest([row[:1] for row in rows], "ttft_s"))
    unknown = [[figures(run, tbt_s=math.nan), figures(run)]]
    assert math.isnan(unrest(unknown, "tbt_s"))
