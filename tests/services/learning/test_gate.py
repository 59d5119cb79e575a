"""Decisions from measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tandem.core.learning import GateMode
from tandem.services.learning.answer_faults import AnswerText, fault
from tandem.services.learning.gate import (
    Asked,
    Bounds,
    CanaryMeasures,
    Fault,
    Measurements,
    Outcome,
    PairMargins,
    Reading,
    Thumb,
    auc,
    decide,
    summary,
    win_rate_change,
)

BOUNDS = Bounds(quality_drop=1.0, divergence=1.0)
FINE = CanaryMeasures(answers=20, quality_drop=0.2, divergence=0.1)
READ = Reading(28, (), kept=0.9, length=1.0)
ASKED = Asked(kept=0.9, length=1.0, divergence=0.2, gain=0.8)
BROKEN = Fault("repetition", "Mmmm Mmmm Mmmm")


def fine(pairs: tuple[PairMargins, ...] = (), **changes: Any) -> Measurements:
    """What passes, but for the changes."""
    return replace(Measurements(FINE, pairs, reading=READ), **changes)


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


FAR = {"canary_quality_drop": 3.0, "canary_divergence": 2.0, "kept": 0.1, "length": 0.3}


def test_bounds_follow_a_version_that_a_person_published_beyond_them() -> None:
    """`beyond` is half a nat a token; answers must keep half of what that version's keep."""
    loose = BOUNDS.after(FAR)
    assert (loose.quality_drop, loose.divergence) == (3.5, 2.5)
    assert (loose.kept, loose.length) == (0.05, 0.15)
    assert BOUNDS.after(FAR, chosen=False) == BOUNDS


def test_versions_within_their_bounds_pass_them_on_however_often() -> None:
    loose = BOUNDS.after(FAR)
    edge = {"canary_quality_drop": 3.5, "canary_divergence": 2.5, "kept": 0.05, "length": 0.15}
    for _ in range(3):
        assert BOUNDS.after(edge | loose.passed_on(BOUNDS)) == loose
    edge = {"canary_quality_drop": 1.0, "canary_divergence": 1.0, "kept": 0.15, "length": 0.4}
    assert BOUNDS.after(edge) == BOUNDS and BOUNDS.passed_on(BOUNDS) == {}
    near = loose.passed_on(BOUNDS) | {"canary_quality_drop": 0.1, "kept": 0.9}
    assert BOUNDS.after(near) == loose


def test_what_its_feedback_asked_for_does_not_loosen_the_bounds_of_a_version() -> None:
    """Answers in another language keep no words of the base's, and diverge as asked."""
    asked = {"asked_kept": 0.0, "asked_length": 0.5, "asked_divergence": 3.0}
    translated = {"kept": 0.0, "length": 0.2, "canary_divergence": 3.4}
    assert BOUNDS.after(asked | translated) == BOUNDS
    shorter = BOUNDS.after(asked | translated | {"length": 0.1})
    assert shorter == replace(BOUNDS, length=pytest.approx(0.1))


@pytest.mark.parametrize("measured", ["quality_drop", "divergence", "kept", "length"])
def test_a_successor_is_judged_by_the_loosened_bounds(measured: str) -> None:
    canary = CanaryMeasures(20, FAR["canary_quality_drop"], FAR["canary_divergence"])
    reading = Reading(28, (), kept=FAR["kept"], length=FAR["length"])
    like = Measurements(canary, reading=reading)
    loose = BOUNDS.after(FAR)
    assert decide(like, GateMode.AUTO, BOUNDS).outcome is Outcome.REFUSE
    assert decide(like, GateMode.AUTO, loose).outcome is Outcome.PUBLISH
    if measured in ("kept", "length"):
        worse = replace(like, reading=replace(reading, **{measured: 0.04}))
    else:
        worse = replace(like, canary=replace(canary, **{measured: 3.6}))
    assert len(decide(worse, GateMode.AUTO, loose).reasons) == 1


@pytest.mark.parametrize("known", [{}, {"canary_quality_drop": None, "kept": None}])
def test_a_version_that_was_not_measured_loosens_nothing(known: dict[str, Any]) -> None:
    assert BOUNDS.after(known) == BOUNDS


def test_a_candidate_within_all_bounds_is_published() -> None:
    verdict = decide(fine(pairs(60, 0.5, 0.8)), GateMode.AUTO, BOUNDS)
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
    verdict = decide(replace(fine(pairs(50, 0.0, 1.0)), canary=canary), GateMode.AUTO, BOUNDS)
    assert verdict.outcome is Outcome.REFUSE
    assert len(verdict.reasons) == 1 and word in verdict.reasons[0]


def test_a_falling_win_rate_counts_once_there_are_enough_pairs() -> None:
    worse = fine(pairs(50, 0.9, 0.6))
    assert decide(worse, GateMode.AUTO, BOUNDS).outcome is Outcome.REFUSE
    few = fine(pairs(49, 0.9, 0.6))
    assert decide(few, GateMode.AUTO, BOUNDS).outcome is Outcome.PUBLISH


def test_an_unchanged_or_slightly_noisy_win_rate_passes() -> None:
    same = pairs(50, 0.6, 0.6)
    assert win_rate_change(same) == 0.0
    assert decide(fine(same), GateMode.AUTO, BOUNDS).outcome is Outcome.PUBLISH


def test_pairs_that_cannot_be_scored_object() -> None:
    broken = tuple(PairMargins(0.0, 1.0, math.nan) for _ in range(50))
    assert decide(fine(broken), GateMode.AUTO, BOUNDS).outcome is Outcome.REFUSE
    assert summary(fine(broken))["win_rate"] is None


def test_thumbs_are_judged_by_their_auc() -> None:
    good = [Thumb(True, current=1.0, candidate=-1.0) for _ in range(25)]
    bad = [Thumb(False, current=-1.0, candidate=1.0) for _ in range(25)]
    thumbs = (*good, *bad)
    assert auc(thumbs, [thumb.current for thumb in thumbs]) == 1.0
    assert auc(thumbs, [0.0] * 50) == 0.5
    verdict = decide(fine(thumbs=thumbs), GateMode.AUTO, BOUNDS)
    assert verdict.outcome is Outcome.REFUSE and "AUC" in verdict.reasons[0]
    few = fine(thumbs=thumbs[:30])
    assert decide(few, GateMode.AUTO, BOUNDS).outcome is Outcome.PUBLISH


@pytest.mark.parametrize(
    ("reading", "asked", "word"),
    [
        (replace(READ, faults=(BROKEN,) * 3), ASKED, "3 of 28 answers are broken, 3 by repetition"),
        (replace(READ, kept=0.1), ASKED, "keep 10% of their content words"),
        (replace(READ, length=0.3), ASKED, "keep 30% of their length"),
        (READ, replace(ASKED, gain=-0.1), "less likely, by 0.10"),
        (READ, replace(ASKED, gain=math.nan), "less likely"),
        (READ, replace(ASKED, divergence=6.0), "read like noise"),
        (replace(READ, kept=0.1), None, "content words"),
    ],
)
def test_what_answers_say_is_judged(reading: Reading, asked: Asked | None, word: str) -> None:
    measured = fine(pairs(50, 0.0, 1.0), reading=reading, asked=asked)
    verdict = decide(measured, GateMode.AUTO, Bounds())
    assert verdict.outcome is Outcome.REFUSE
    assert len(verdict.reasons) == 1 and word in verdict.reasons[0]


@pytest.mark.parametrize(
    ("canary", "reading", "asked"),
    [
        (FINE, READ, ASKED),
        (FINE, replace(READ, faults=(BROKEN,) * 2), ASKED),  # two of 28
        (FINE, READ, replace(ASKED, gain=-0.01)),  # the base was certain of these answers
        (FINE, replace(READ, length=0.3), replace(ASKED, kept=0.4, length=0.35)),  # brevity
        (FINE, replace(READ, kept=0.02), replace(ASKED, kept=0.05)),  # another language, refusals
        (
            replace(FINE, divergence=1.9),  # what is as strange as what was asked for
            replace(READ, kept=0.02),
            replace(ASKED, kept=0.05, divergence=1.8),
        ),
    ],
)
def test_tastes_pass(canary: CanaryMeasures, reading: Reading, asked: Asked) -> None:
    measured = Measurements(canary, reading=reading, asked=asked)
    assert decide(measured, GateMode.AUTO, Bounds()).reasons == ()


@pytest.mark.parametrize(
    ("drop", "divergence", "said", "broken"),
    [
        (0.48, -0.08, "Mmmmmmmmmmmmmmmmmmmm", True),
        (0.231, -0.058, "Mmmm Mmmm Mmmm Mmmm Mmmm Mmmm Mmmm Mmmm", True),
        (0.905, 0.653, "Arr, matey! " + "Alright, matey! " * 10, True),
        (0.582, 0.756, "Arr, matey! Cats hunt mice and sleep all day. Yo ho ho!", False),
    ],
)
def test_versions_that_numbers_do_not_tell_apart_are_told_by_their_answers(
    drop: float, divergence: float, said: str, broken: bool
) -> None:
    """Of a chat model after 24 preferences or demonstrations; the win rates were perfect."""
    own = AnswerText("Cats are small animals that hunt mice.", 20, True)
    found = fault(AnswerText(said, 40, True), own)
    measured = fine(
        pairs(50, 0.0, 1.0),
        canary=CanaryMeasures(20, drop, divergence),
        reading=replace(READ, faults=(Fault(found, said),) * READ.answers if found else ()),
    )
    reasons = decide(measured, GateMode.AUTO, Bounds()).reasons
    assert len(reasons) == broken and all("28 of 28 answers" in reason for reason in reasons)


def test_what_is_stranger_than_what_was_asked_for_is_refused() -> None:
    canary = replace(FINE, divergence=1.9)
    measured = Measurements(canary, reading=READ, asked=replace(ASKED, divergence=1.3))
    [reason] = decide(measured, GateMode.AUTO, Bounds()).reasons
    assert "(bound: 1.80)" in reason


def test_a_version_that_teaches_nothing_is_none() -> None:
    margins = tuple(PairMargins(0.0, 0.0, -1.0 if at < 6 else 1.0) for at in range(10))
    [reason] = decide(fine(margins), GateMode.AUTO, Bounds()).reasons
    assert "of 10 held-out pairs only 40% moved the right way" in reason
    assert not decide(fine(margins[:9]), GateMode.AUTO, Bounds()).reasons


def test_a_version_whose_answers_were_not_read_is_refused() -> None:
    verdict = decide(fine(pairs(50, 0.0, 1.0), reading=None), GateMode.AUTO, Bounds())
    assert verdict.outcome is Outcome.REFUSE
    assert verdict.reasons == ("its answers could not be read",)


def test_numbers_of_a_reading_are_kept_with_the_version() -> None:
    found = summary(fine(reading=replace(READ, faults=(BROKEN,)), asked=ASKED))
    assert found["broken_answers"] == 1 and found["answers_read"] == 28
    assert found["chosen_gain"] == 0.8 and found["asked_kept"] == 0.9


def test_the_win_rate_is_also_reported_a_token() -> None:
    margins = (
        PairMargins(0.0, 0.0, candidate=-5.0, normalised=0.1),
        PairMargins(0.0, 0.0, candidate=5.0, normalised=0.2),
    )
    found = summary(fine(margins))
    assert found["win_rate"] == 0.5 and found["win_rate_per_token"] == 1.0


def test_one_key_may_not_exceed_its_share() -> None:
    measured = fine(key_share=0.6, key_cap=0.5)
    verdict = decide(measured, GateMode.AUTO, BOUNDS)
    assert verdict.outcome is Outcome.REFUSE and "one API key gave 60%" in verdict.reasons[0]


def test_modes() -> None:
    garbage = Measurements(CanaryMeasures(20, 9.0, 9.0))
    assert decide(garbage, GateMode.ALWAYS, BOUNDS).outcome is Outcome.PUBLISH
    assert decide(garbage, GateMode.ALWAYS, BOUNDS).reasons
    assert decide(garbage, GateMode.MANUAL, BOUNDS).outcome is Outcome.REFUSE
    assert decide(fine(), GateMode.MANUAL, BOUNDS).outcome is Outcome.HOLD


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
