"""Decisions from measurements."""

from __future__ import annotations

import math
from random import Random

import pytest

from tandem.core.learning import GateMode
from tandem.services.learning.gate import (
    Bounds,
    CanaryMeasures,
    Measurements,
    Outcome,
    PairMargins,
    Thumb,
    auc,
    decide,
    summary,
    win_rate_change,
)

BOUNDS = Bounds(quality_drop=1.0, divergence=1.0)
FINE = CanaryMeasures(answers=20, quality_drop=0.2, divergence=0.1)


def pairs(count: int, current: float, candidate: float) -> tuple[PairMargins, ...]:
    """So many pairs; the rates are how many of them a model prefers rightly."""
    return tuple(
        PairMargins(
            reference=0.0,
            current=1.0 if place < current * count else -1.0,
            candidate=1.0 if place < candidate * count else -1.0,
        )
        for place in range(count)
    )


def test_a_candidate_within_all_bounds_is_published() -> None:
    verdict = decide(Measurements(FINE, pairs(60, 0.5, 0.8)), GateMode.AUTO, BOUNDS)
    assert verdict.outcome is Outcome.PUBLISH and verdict.reasons == ()
    assert verdict.metrics["win_rate"] == pytest.approx(0.8)
    assert verdict.metrics["win_rate_before"] == pytest.approx(0.5)
    assert verdict.metrics["canary_divergence"] == 0.1


@pytest.mark.parametrize(
    ("canary", "word"),
    [
        (CanaryMeasures(20, 1.5, 0.1), "lost 1.50 nats"),
        (CanaryMeasures(20, 0.1, 3.0), "3.00 nats a token less likely"),
        (CanaryMeasures(20, math.nan, 0.1), "not finite"),
        (CanaryMeasures(20, 0.1, math.inf), "not finite"),
    ],
)
def test_garbage_is_refused_though_its_own_win_rate_rises(
    canary: CanaryMeasures, word: str
) -> None:
    verdict = decide(Measurements(canary, pairs(50, 0.0, 1.0)), GateMode.AUTO, BOUNDS)
    assert verdict.outcome is Outcome.REFUSE
    assert len(verdict.reasons) == 1 and word in verdict.reasons[0]


def test_a_falling_win_rate_counts_once_there_are_enough_pairs() -> None:
    worse = Measurements(FINE, pairs(50, 0.9, 0.6))
    assert decide(worse, GateMode.AUTO, BOUNDS).outcome is Outcome.REFUSE
    few = Measurements(FINE, pairs(49, 0.9, 0.6))
    assert decide(few, GateMode.AUTO, BOUNDS).outcome is Outcome.PUBLISH


def test_an_unchanged_or_slightly_noisy_win_rate_passes() -> None:
    same = pairs(50, 0.6, 0.6)
    assert win_rate_change(same) == 0.0
    assert decide(Measurements(FINE, same), GateMode.AUTO, BOUNDS).outcome is Outcome.PUBLISH


def test_pairs_that_cannot_be_scored_object() -> None:
    broken = tuple(PairMargins(0.0, 1.0, math.nan) for _ in range(50))
    assert decide(Measurements(FINE, broken), GateMode.AUTO, BOUNDS).outcome is Outcome.REFUSE
    assert summary(Measurements(FINE, broken))["win_rate"] is None


def test_thumbs_are_judged_by_their_auc() -> None:
    good = [Thumb(True, current=1.0, candidate=-1.0) for _ in range(25)]
    bad = [Thumb(False, current=-1.0, candidate=1.0) for _ in range(25)]
    thumbs = (*good, *bad)
    assert auc(thumbs, [thumb.current for thumb in thumbs]) == 1.0
    assert auc(thumbs, [0.0] * 50) == 0.5
    verdict = decide(Measurements(FINE, thumbs=thumbs), GateMode.AUTO, BOUNDS)
    assert verdict.outcome is Outcome.REFUSE and "AUC" in verdict.reasons[0]
    few = Measurements(FINE, thumbs=thumbs[:30])
    assert decide(few, GateMode.AUTO, BOUNDS).outcome is Outcome.PUBLISH


def test_one_key_may_not_exceed_its_share() -> None:
    measured = Measurements(FINE, key_share=0.6, key_cap=0.5)
    verdict = decide(measured, GateMode.AUTO, BOUNDS)
    assert verdict.outcome is Outcome.REFUSE and "one API key gave 60%" in verdict.reasons[0]


def test_modes() -> None:
    garbage = Measurements(CanaryMeasures(20, 9.0, 9.0))
    assert decide(garbage, GateMode.ALWAYS, BOUNDS).outcome is Outcome.PUBLISH
    assert decide(garbage, GateMode.ALWAYS, BOUNDS).reasons
    assert decide(garbage, GateMode.MANUAL, BOUNDS).outcome is Outcome.REFUSE
    assert decide(Measurements(FINE), GateMode.MANUAL, BOUNDS).outcome is Outcome.HOLD


def test_the_bound_is_a_bound() -> None:
    """Over many draws of an unchanged candidate, a real fall is claimed in few of them."""
    rng = Random(7)
    refused = 0
    for _ in range(300):
        drawn = tuple(
            PairMargins(0.0, rng.gauss(0.5, 1.0), rng.gauss(0.5, 1.0)) for _ in range(100)
        )
        refused += win_rate_change(drawn) > 0.0
    assert refused / 300 < 0.1


@pytest.mark.parametrize("mode", list(GateMode))
def test_output_that_is_not_finite_is_refused_in_every_mode(mode: GateMode) -> None:
    verdict = decide(Measurements(CanaryMeasures(20, math.nan, math.nan)), mode, BOUNDS)
    assert verdict.outcome is Outcome.REFUSE
    assert verdict.reasons == ("the model's output is not finite",)
    assert verdict.metrics["canary_quality_drop"] is None
