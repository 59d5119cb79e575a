"""What users do without being asked, as ratings, pairs and demonstrations of little weight.

Pure functions; `docs/learning.md` has the same table and a test compares the two. Such signals are
doubtful, so that each counts a fraction of an explicit one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tandem.core.errors import InvalidRequest
from tandem.core.learning import FeedbackKind


class SignalType(StrEnum):
    """What the user did with an answer."""

    REGENERATE = "regenerate"
    EDIT = "edit"
    SKIP = "skip"
    DWELL_TIME = "dwell_time"
    REPHRASE = "rephrase"


EXPLICIT = "explicit"
READING_WORDS_A_SECOND = 4.0
"""A brisk reader (Brysbaert 2019: 238 words a minute on average)."""

WEIGHTS = {
    "regenerate with a kept answer": 0.5,
    "regenerate": 0.25,
    "edit": 0.5,
    "edit without a change": 0.5,
    "skip": 0.1,
    "dwell_time short": 0.1,
    "dwell_time long": 0.1,
    "rephrase": 0.25,
}
_SHORT, _LONG = 0.2, 1.0


@dataclass(frozen=True, slots=True)
class Signal:
    """An implicit signal about an answer.

    `text` is the edited answer (edit) or the answer that the user kept instead (regenerate);
    `seconds` is how long the answer was looked at (dwell_time).
    """

    type: SignalType
    text: str | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Meaning:
    """What feedback says, by `kind`; `weight` scales what the client gave.

    A rating is about `rejected` or `chosen` alike: the answer is in `chosen`. A weight of 0 makes
    no sample.
    """

    kind: FeedbackKind
    chosen: str
    rejected: str = ""
    rating: float | None = None
    weight: float = 1.0


def interpret(signal: Signal, answer: str, shown: str = "") -> Meaning:
    """The explicit form of `signal` about `answer`, of which the user was `shown` that (empty: all
    of it). Raises `InvalidRequest` for a missing field."""
    shown = shown or answer
    match signal.type:
        case SignalType.REGENERATE if signal.text is not None:
            weight = WEIGHTS["regenerate with a kept answer"]
            return Meaning(FeedbackKind.PREFERENCE, signal.text, answer, weight=weight)
        case SignalType.REGENERATE:
            return _rated(answer, 0.0, "regenerate")
        case SignalType.EDIT:
            if signal.text is None:
                raise InvalidRequest("an edit needs the edited 'text'", param="signal.text")
            if signal.text.strip() in (shown.strip(), answer.strip()):
                return _rated(answer, 1.0, "edit without a change")
            weight = WEIGHTS["edit"]
            return Meaning(FeedbackKind.DEMONSTRATION, signal.text, answer, weight=weight)
        case SignalType.SKIP:
            return _rated(answer, 0.0, "skip")
        case SignalType.DWELL_TIME:
            return _dwelt(signal, answer, reading_s(shown))
        case SignalType.REPHRASE:
            return _rated(answer, 0.0, "rephrase")


def reading_s(answer: str) -> float:
    """Seconds in which a brisk reader reads an answer."""
    return max(len(answer.split()), 1) / READING_WORDS_A_SECOND


def _dwelt(signal: Signal, answer: str, reading_time_s: float) -> Meaning:
    """Looked at for less than a fifth of the reading time, or for at least all of it."""
    if signal.seconds is None:
        raise InvalidRequest("a dwell time needs 'seconds'", param="signal.seconds")
    if signal.seconds < _SHORT * reading_time_s:
        return _rated(answer, 0.0, "dwell_time short")
    if signal.seconds >= _LONG * reading_time_s:
        return _rated(answer, 1.0, "dwell_time long")
    return Meaning(FeedbackKind.RATING, answer, rating=0.5, weight=0.0)


def _rated(answer: str, rating: float, what: str) -> Meaning:
    return Meaning(FeedbackKind.RATING, answer, rating=rating, weight=WEIGHTS[what])
