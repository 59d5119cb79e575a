"""The offline requests of an iteration, which have no objective and take what online ones leave.

Reads the view, changes nothing. Invariant: they are in order of arrival, and none that is overdue,
or that comes before an online one of the queue, is among them: its turn has come another way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.ordered import class_then_arrival
from tandem.scheduling.view import View

# Where offline requests begin in the order of class and arrival.
_OFFLINE = (1, float("-inf"), 0)
# In an iteration no more begin, so that no more prefixes need to be looked up.
_MOST_BEGIN = 8


@dataclass(slots=True)
class OfflineRequests:
    """Those that run, and the first of those that wait while one could start."""

    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting)

    def begin(self, view: View) -> Iterator[tuple[Sequence, int]]:
        """Those that wait, each with how many of its tokens are cached."""
        return ((seq, view.match(seq)) for seq in self.waiting)


def any_offline(view: View, serving: list[Sequence]) -> bool:
    """Whether an offline request runs or waits: they are the last in every order."""
    waits = view.waiting_in_order
    return bool((serving and _is_offline(serving[-1])) or (waits and _is_offline(waits[-1])))


def set_apart(
    view: View, serving: list[Sequence], queue: list[Sequence], overdue: Sequence | None
) -> tuple[list[Sequence], list[Sequence], OfflineRequests]:
    """The running and the waiting requests that are online, or overdue, and the other offline
    ones."""
    first = bisect_left(serving, _OFFLINE, key=class_then_arrival)
    online, running = serving[:first], serving[first:]
    if overdue is not None and overdue in running:
        running.remove(overdue)
        online.append(overdue)
    while queue and queue[-1] is not overdue and _is_offline(queue[-1]):
        queue = queue[:-1]
    waiting: list[Sequence] = []
    if view.budgets.max_sequences > len(view.running) + len(queue):  # else none could start
        waits, taken = view.waiting_in_order, set(queue)
        begin = bisect_left(waits, _OFFLINE, key=class_then_arrival)
        waiting = [seq for seq in waits[begin : begin + _MOST_BEGIN] if seq not in taken]
    return online, queue, OfflineRequests(running, waiting)


def _is_offline(seq: Sequence) -> bool:
    return seq.request.work_class is WorkClass.OFFLINE
