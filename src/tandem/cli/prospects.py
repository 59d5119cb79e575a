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
    "learned": "{} of them were sent before: {}",
}
_MOST_NOTES = 10


class Prospects:
    """Of many feedbacks; given in any order, by one thread or by several."""

    def __init__(self) -> None:
        self._notes: Counter[tuple[str, str]] = Counter()
        self._next: dict[str, dict[str, Any]] = {}

    def add(self, stored: dict[str, Any]) -> None:
        """One feedback, as the server answered."""
        learning = stored.get("learning") or {}
        state = str(learning.get("state", ""))
        if state in _TOLD:
            self._notes[state, str(learning.get("note") or "")] += 1
        adapter, then = str(stored.get("adapter", "")), learning.get("next")
        if then and then["samples"] >= self._next.get(adapter, then)["samples"]:
            self._next[adapter] = then

    @property
    def were_sent_before(self) -> bool:
        """Whether versions have learned from some of them already."""
        return any(state == "learned" for state, _ in self._notes)

    def lines(self) -> Iterator[str]:
        """What there is to say."""
        for (state, note), count in self._notes.most_common(_MOST_NOTES):
            yield _TOLD[state].format(count, note)
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
