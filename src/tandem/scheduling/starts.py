"""Waiting sequences by the time at which they must start to meet their objective.

Knows times only. Invariant: sorted by time, then by number, so that equal contents give equal
answers; the place of a time or of a sequence is found in O(log n).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from tandem.core.sequence import Sequence

# Of a sequence that has its first token: it is neither in time nor late any more.
BEGUN = -math.inf


class StartTimes:
    """Sequences with the time, on the engine's clock, after which each is late, or `BEGUN`."""

    __slots__ = ("_entries", "_num_begun", "_start_by_s")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Sequence]] = []  # those that have begun come first
        self._num_begun = 0
        self._start_by_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, seq: Sequence, start_by_s: float) -> None:
        """Put a sequence in that is not here."""
        assert seq.seq_id not in self._start_by_s
        self._start_by_s[seq.seq_id] = start_by_s
        self._num_begun += start_by_s == BEGUN
        insort(self._entries, (start_by_s, seq.seq_id, seq))

    def discard(self, seq: Sequence) -> None:
        """Take a sequence out, if it is here."""
        start_by_s = self._start_by_s.pop(seq.seq_id, None)
        if start_by_s is not None:
            self._num_begun -= start_by_s == BEGUN
            del self._entries[bisect_left(self._entries, (start_by_s, seq.seq_id))]

    def begun(self) -> list[Sequence]:
        """All that have a token, by number."""
        return [entry[2] for entry in self._entries[: self._num_begun]]

    def any_late(self, now: float) -> bool:
        """Whether a sequence must have started before `now`."""
        first = self._num_begun
        return len(self._entries) > first and self._entries[first][0] < now

    def late(self, now: float, count: int) -> list[Sequence]:
        """The `count` that are late for the longest time."""
        first = self._num_begun
        return [entry[2] for entry in self._entries[first : first + count] if entry[0] < now]

    def in_time(self, now: float, count: int) -> list[Sequence]:
        """The `count` that must start first of those that are not late yet."""
        first = bisect_left(self._entries, (now,))
        return [entry[2] for entry in self._entries[first : first + count]]
