"""Sequences with one status, in two orders: by entry, and by class and arrival.

Few sequences change their status in an iteration, and many are read. So both orders are maintained
instead of sorted when needed. Invariant: `in_order` is sorted and holds the same sequences as the
dictionary.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, ValuesView
from operator import attrgetter

from tandem.core.sequence import Sequence

# Online, then offline, then learning; by arrival within each.
class_then_arrival: Callable[[Sequence], tuple[int, float, int]] = attrgetter("order")


class OrderedSequences:
    """Sequences by `seq_id`, oldest entry first. `in_order` lists them by class and arrival."""

    __slots__ = ("_by_id", "in_order")

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self.in_order: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def get(self, seq_id: int) -> Sequence | None:
        """The sequence with this id, or None if it is not here."""
        return self._by_id.get(seq_id)

    def values(self) -> ValuesView[Sequence]:
        """All sequences, in order of entry."""
        return self._by_id.values()

    def add(self, seq: Sequence) -> None:
        """Add a sequence that is not here yet. It becomes the last entry."""
        assert seq.seq_id not in self._by_id
        self._by_id[seq.seq_id] = seq
        insort(self.in_order, seq, key=class_then_arrival)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that is here."""
        del self._by_id[seq.seq_id]
        place = bisect_left(self.in_order, seq.order, key=class_then_arrival)
        assert self.in_order[place] is seq
        del self.in_order[place]

    @property
    def requests(self) -> list[Sequence]:
        """Sequences that are not scored, by class and arrival."""
        return self.in_order[: self.num_requests]

    @property
    def num_requests(self) -> int:
        """Number of sequences that are not scored. Scored ones are last in the order."""
        in_order = self.in_order
        if not in_order or in_order[-1].scoring is None:
            return len(in_order)
        return bisect_left(in_order, True, key=_is_scored)


def _is_scored(seq: Sequence) -> bool:
    return seq.scoring is not None
