"""Sequences with one status: in the order in which they got it, and by class and arrival.

In an iteration few sequences change their status and many are looked at, so both orders are kept,
not made. Invariant: `in_order` is sorted and holds what the dictionary holds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, ValuesView
from operator import attrgetter

from tandem.core.sequence import Sequence

# Online, then offline, then learning; within each, order of arrival.
class_then_arrival: Callable[[Sequence], tuple[int, float, int]] = attrgetter("order")


class OrderedSequences:
    """Sequences by `seq_id`, oldest entry first; `in_order` has them by class and arrival."""

    __slots__ = ("_by_id", "in_order")

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self.in_order: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def get(self, seq_id: int) -> Sequence | None:
        """The sequence of this number, if it is here."""
        return self._by_id.get(seq_id)

    def values(self) -> ValuesView[Sequence]:
        """All of them in the order in which they came."""
        return self._by_id.values()

    def add(self, seq: Sequence) -> None:
        """Put a sequence in that is not here; it is the last that came."""
        assert seq.seq_id not in self._by_id
        self._by_id[seq.seq_id] = seq
        insort(self.in_order, seq, key=class_then_arrival)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out that is here."""
        del self._by_id[seq.seq_id]
        place = bisect_left(self.in_order, seq.order, key=class_then_arrival)
        assert self.in_order[place] is seq
        del self.in_order[place]

    @property
    def requests(self) -> list[Sequence]:
        """Those that are not scored, by class and arrival."""
        return self.in_order[: self.num_requests]

    @property
    def num_requests(self) -> int:
        """How many are not scored: what is scored comes last in the order."""
        in_order = self.in_order
        if not in_order or in_order[-1].scoring is None:
            return len(in_order)
        return bisect_left(in_order, True, key=_is_scored)


def _is_scored(seq: Sequence) -> bool:
    return seq.scoring is not None
