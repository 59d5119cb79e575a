"""The offline requests of an iteration. They have no objective and use what online ones leave.

Reads the view, changes nothing. Invariant: they are in order of arrival. A starving one is not
among them, nor one that comes before an online request in the queue: the queue has both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.queues import num_online
from tandem.scheduling.view import View

# Most requests that begin in an iteration: it bounds the prefixes to look up.
_MOST_BEGIN = 8
# Share of the sequence slots that is reserved for learning while there is some.
_KEPT_SHARE = 0.125


@dataclass(slots=True)
class OfflineRequests:
    """Offline requests that may take part in an iteration."""

    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)  # the first ones, if one could start
    alone: bool = False  # whether there is no online request beside them

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting)

    def begin(self, view: View) -> Iterator[tuple[Sequence, int]]:
        """The waiting ones, each with the number of its cached tokens."""
        return ((seq, view.match(seq)) for seq in self.waiting)


def any_offline(view: View, serving: list[Sequence]) -> bool:
    """Whether an offline request runs or waits. They are last in every order."""
    waits = view.waiting_in_order
    return bool((serving and _is_offline(serving[-1])) or (waits and _is_offline(waits[-1])))


def set_apart(
    view: View,
    serving: list[Sequence],
    queue: list[Sequence],
    overdue: Sequence | None,
    *,
    learns: bool,
) -> tuple[list[Sequence], list[Sequence], OfflineRequests]:
    """Split the requests: online ones that run, online ones that wait, and offline ones. A starving
    offline request counts as online.

    No offline request may begin without a free slot. If something `learns`, its reserved slots do
    not count as free: long answers would block it.
    """
    first = num_online(serving)
    online, running = serving[:first], serving[first:]
    if overdue is not None and overdue in running:
        running.remove(overdue)
        online.append(overdue)
    end = len(queue)
    while end and queue[end - 1] is not overdue and _is_offline(queue[end - 1]):
        end -= 1
    queue = queue[:end]
    waiting: list[Sequence] = []
    slots = view.budgets.max_sequences - len(view.running) - len(queue)
    slots -= _kept_slots(view) if learns else 0
    if slots > 0:
        waits, taken = view.waiting_in_order, set(queue)
        begin = num_online(waits)
        some = waits[begin : begin + _MOST_BEGIN]
        waiting = [seq for seq in some if seq not in taken][:slots]
    return online, queue, OfflineRequests(running, waiting, alone=not (first or queue))


def _kept_slots(view: View) -> int:
    """Slots that offline requests leave to learning."""
    most = view.budgets.max_sequences
    return min(max(1, int(_KEPT_SHARE * most)), most - 1)


def _is_offline(seq: Sequence) -> bool:
    return seq.request.work_class is WorkClass.OFFLINE
