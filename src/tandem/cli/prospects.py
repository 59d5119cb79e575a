"""What becomes of feedback, in words: of the `learning` in the server's answer to it.

Knows the wire format only. Invariant: it says no more than the server has said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

# States of which an import tells, and how.
_TOLD = {
    "waits": "{} of them wait: {}",
    "nothing": "{} of them teach nothing: {}",
    "learned": "{} of them are not new: {}",
}
_TRIED = ("consumed", "refused")  # states of samples
_MOST_NOTES = 10


class Prospects:
    """Of many feedbacks, in any order."""

    def __init__(self) -> None:
        self._notes: Counter[tuple[str, str]] = Counter()
        self._next: dict[str, dict[str, Any]] = {}
        self._tried = False  # whether versions have learned from some of them already

    def add(self, stored: dict[str, Any]) -> None:
        """One feedback, as the server answered."""
        learning = stored.get("learning") or {}
        self._tried |= any(each["state"] in _TRIED for each in stored.get("samples") or ())
        state = str(learning.get("state", ""))
        if state in _TOLD:
            self._notes[state, str(learning.get("note") or "")] += 1
        adapter, then = str(stored.get("adapter", "")), learning.get("next")
        if then and then["samples"] >= self._next.get(adapter, then)["samples"]:
            self._next[adapter] = then

    def lines(self, attempt: int) -> Iterator[str]:
        """What there is to say after this `--attempt` of an import."""
        shown = self._notes.most_common(_MOST_NOTES)
        for (state, note), count in shown:
            yield _TOLD[state].format(count, note)
        if left := self._notes.total() - sum(count for _, count in shown):
            yield f"and {left} more"
        if self._tried:
            yield f"`--attempt {attempt + 1}` sends lines without an id as new feedback"
        for adapter, then in sorted(self._next.items()):
            yield f"{adapter}: {begins(then)} (tandem adapters watch {adapter})"


def begins(then: dict[str, Any]) -> str:
    """When the next version begins (`learning.next`)."""
    if not then["starts_in_s"]:
        return "a version is being made, or about to be"
    missing = then["enough"] - then["samples"]
    sooner = f", or soon after {missing} more" if missing > 0 else ""
    return f"a version begins in {_duration(then['starts_in_s'])}{sooner}"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(1.0, seconds):.0f} s"
