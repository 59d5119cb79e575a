"""Implicit signals mean what docs/learning.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.core.errors import InvalidRequest
from tandem.core.learning import FeedbackKind
from tandem.services.feedback.signals import WEIGHTS, Signal, SignalType, interpret

DOCS = Path(__file__).parents[3] / "docs" / "learning.md"
ANSWER = "one two three four five six seven eight"  # read in two seconds


@pytest.mark.parametrize(
    ("signal", "kind", "rating", "case"),
    [
        (Signal(SignalType.REGENERATE), FeedbackKind.RATING, 0.0, "regenerate"),
        (
            Signal(SignalType.REGENERATE, text="kept"),
            FeedbackKind.PREFERENCE,
            None,
            "regenerate with a kept answer",
        ),
        (Signal(SignalType.EDIT, text="kept"), FeedbackKind.DEMONSTRATION, None, "edit"),
        (
            Signal(SignalType.EDIT, text=ANSWER + " "),
            FeedbackKind.RATING,
            1.0,
            "edit without a change",
        ),
        (Signal(SignalType.SKIP), FeedbackKind.RATING, 0.0, "skip"),
        (Signal(SignalType.REPHRASE), FeedbackKind.RATING, 0.0, "rephrase"),
        (
            Signal(SignalType.DWELL_TIME, seconds=0.3),
            FeedbackKind.RATING,
            0.0,
            "dwell_time short",
        ),
        (Signal(SignalType.DWELL_TIME, seconds=2.0), FeedbackKind.RATING, 1.0, "dwell_time long"),
    ],
)
def test_what_each_signal_becomes(
    signal: Signal, kind: FeedbackKind, rating: float | None, case: str
) -> None:
    meaning = interpret(signal, ANSWER)
    assert (meaning.kind, meaning.rating, meaning.weight) == (kind, rating, WEIGHTS[case])
    answers = (meaning.chosen, meaning.rejected)
    assert answers == ((ANSWER, "") if kind is FeedbackKind.RATING else ("kept", ANSWER))


def test_a_moderate_look_says_nothing() -> None:
    assert interpret(Signal(SignalType.DWELL_TIME, seconds=1.0), ANSWER).weight == 0.0


@pytest.mark.parametrize("kind", [SignalType.EDIT, SignalType.DWELL_TIME])
def test_what_is_missing_is_named(kind: SignalType) -> None:
    with pytest.raises(InvalidRequest):
        interpret(Signal(kind), ANSWER)


def test_the_documented_table_is_the_code() -> None:
    section = DOCS.read_text().partition("### Implicit signals")[2].partition("###")[0]
    rows = re.findall(r"^\| `(\w+)`([^|]*) \|.*\| ([\d.]+) \|$", section, re.MULTILINE)
    assert {name + more: float(weight) for name, more, weight in rows} == WEIGHTS
