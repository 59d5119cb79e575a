"""Waiting sequences by the latest start that still meets their objective.

Knows times and expected lengths only. Invariant: sorted by time, then by number, so equal contents
give equal answers. A time or a sequence is found in O(log n).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from tandem.core.sequence import Sequence

# The start time of a sequence that has its first token. It is neither in time nor late.
BEGUN = -math.inf

# Of late sequences, so many are compared by their lengths: those that are late for longest.
_COMPARED = 256


class StartTimes:
    """Sequences with the time after which each is late (on the engine's clock), or `BEGUN`."""

    __slots__ = ("_entries", "_num_begun", "_start_by_s")

    def __init__(self) -> None:
        # Sorted, begun first. The last number is the expected length of the answer; 0: unknown.
        self._entries: list[tuple[float, int, Sequence, float]] = []
        self._num_begun = 0
        self._start_by_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, seq: Sequence, start_by_s: float) -> None:
        """Add a sequence that is not here."""
        assert seq.seq_id not in self._start_by_s
        self._start_by_s[seq.seq_id] = start_by_s
        self._num_begun += start_by_s == BEGUN
        length = seq.request.length
        tokens = 0.0 if length is None else length.quantile(0.5)
        insort(self._entries, (start_by_s, seq.seq_id, seq, tokens))

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence if it is here."""
        start_by_s = self._start_by_s.pop(seq.seq_id, None)
        if start_by_s is not None:
            self._num_begun -= start_by_s == BEGUN
            del self._entries[bisect_left(self._entries, (start_by_s, seq.seq_id))]

    def begun(self) -> list[Sequence]:
        """Sequences that have a token, by number."""
        return [entry[2] for entry in self._entries[: self._num_begun]]

    def any_late(self, now: float) -> bool:
        """Whether a sequence should have started before `now`."""
        first = self._num_begun
        return len(self._entries) > first and self._entries[first][0] < now

    def late(self, now: float, count: int) -> list[Sequence]:
        """Up to `count` late sequences, the longest late first."""
        first = self._num_begun
        return [entry[2] for entry in self._entries[first : first + count] if entry[0] < now]

    def late_by_length(self, now: float) -> list[Sequence]:
        """The late sequences that are compared, by slack over expected length: the latest for its
        length first. An answer of unknown length counts as the longest of them."""
        end = min(bisect_left(self._entries, (now,)), self._num_begun + _COMPARED)
        late = self._entries[self._num_begun : end]
        most = max([each[3] for each in late], default=0.0) or 1.0
        late.sort(key=lambda each: (each[0] - now) / (each[3] or most))
        return [each[2] for each in late]

    def in_time(self, now: float, count: int) -> list[Sequence]:
        """Up to `count` sequences that are not late, the earliest start time first."""
        first = bisect_left(self._entries, (now,))
        return [entry[2] for entry in self._entries[first : first + count]]
