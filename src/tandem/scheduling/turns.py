"""Who of the waiting requests goes first once some are too late to meet their objective.

First come, first served makes everybody late once the queue is longer than the objective. Here
those that can still be in time go first, and late ones have a share of the starts: none starves.
Invariant: while nobody is late, the order is that of class and arrival.
"""

from __future__ import annotations

from tandem.core.sequence import Sequence, SequenceStatus
from tandem.scheduling.queues import first_waiting
from tandem.scheduling.view import View


class Turns:
    """Remembers whom it put first and how many of these have started.

    `late_share` of the starts are of late requests while others are in time; with 1 the order is
    always that of class and arrival.
    """

    def __init__(self, late_share: float) -> None:
        self._late_share = late_share
        self._credit = 0.0
        self._offered: list[Sequence] = []

    def queue(self, view: View, count: int) -> list[Sequence]:
        """The first `count` waiting sequences, in the order in which they should start.

        Answers that have begun (and were preempted) come first: somebody reads them.
        """
        first = first_waiting(view, count)
        if self._late_share >= 1.0 or not view.starts.any_late(view.now):
            return first
        self._settle()
        in_time = view.starts.in_time(view.now, count)
        late = view.starts.late(view.now, count)
        self._offered = self._merge(in_time, late, count)
        begun = view.starts.begun()
        listed = {seq.seq_id for seq in (*begun, *self._offered)}
        rest = [seq for seq in first if seq.seq_id not in listed]
        return [*begun, *self._offered, *rest][:count]

    def _settle(self) -> None:
        """Count the starts of those that were offered last: whoever stands first starts first."""
        for seq in self._offered:
            if seq.status is SequenceStatus.WAITING:
                break
            self._credit += self._late_share
            self._credit -= self._credit >= 1.0
        self._offered = []

    def _merge(self, in_time: list[Sequence], late: list[Sequence], count: int) -> list[Sequence]:
        """A late one whenever their share has grown to a whole start, else one that is in time."""
        merged: list[Sequence] = []
        credit, next_in_time, next_late = self._credit, 0, 0
        for _ in range(min(count, len(in_time) + len(late))):
            credit += self._late_share
            turn = credit >= 1.0
            credit -= turn
            if next_late < len(late) and (turn or next_in_time == len(in_time)):
                merged.append(late[next_late])
                next_late += 1
            else:
                merged.append(in_time[next_in_time])
                next_in_time += 1
        return merged
