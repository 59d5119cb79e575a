"""The offline requests of an iteration. They have no objective and use what online ones leave.

Reads the view, changes nothing. Invariant: those that run are in order of arrival, those that wait
by their value (Echo, equation 4). A starving one is not among them, nor one that comes
before an online request in the queue: the queue has both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.work import PassWork
from tandem.kv.offline_pool import Offered
from tandem.scheduling.queues import num_online
from tandem.scheduling.view import View

# Most requests of one bucket that begin in an iteration: it bounds the prefixes to look up.
_MOST_BEGIN = 8
# Share of the sequence slots that is reserved for learning while there is some.
_KEPT_SHARE = 0.125


@dataclass(slots=True)
class OfflineRequests:
    """Offline requests that may take part in an iteration."""

    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)  # the best ones, if one could start
    alone: bool = False  # whether there is no online request beside them

    def __bool__(self) -> bool:
        return bool(self.running or self.waiting)

    def begin(self, view: View) -> Iterator[tuple[Sequence, int, int]]:
        """The waiting ones, each with the number of its cached tokens, and of the blocks that it
        needs beside those that others hold.

        Beside other offline requests one begins only if it leaves the blocks that online requests
        will want (Echo 4.2, 5.3).
        """
        held = view.held_blocks(WorkClass.ONLINE)
        spare = view.available_blocks + held - view.online_demand_blocks
        alone = not self.running
        for seq in self.waiting:
            blocks = view.new_blocks(seq, len(seq.tokens))
            if blocks <= spare or alone:
                yield seq, view.match(seq), blocks
                spare, alone = spare - blocks, False


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
    oldest_first: bool,
) -> tuple[list[Sequence], list[Sequence], OfflineRequests]:
    """Split the requests: online ones that run, online ones that wait, and offline ones. A starving
    offline request counts as online.

    No offline request may begin without a free slot. If something `learns`, its reserved slots do
    not count as free: long answers would block it. With `oldest_first` no other may begin before
    the one that came first.
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
        if oldest_first:
            best = waits[num_online(waits) :][:1]
        else:
            offered = list(view.offline_pool.best_of_buckets(_MOST_BEGIN))
            offered.sort(key=lambda each: -_value(view, each))
            best = [each.seq for each in offered]
        waiting = [seq for seq in best if seq not in taken][:slots]
    return online, queue, OfflineRequests(running, waiting, alone=not (first or queue))


def _value(view: View, offered: Offered) -> float:
    """Tokens a second that come of a prompt, those of its cached prefix included."""
    work, length = PassWork(), len(offered.seq.tokens)
    work.span(offered.cached_tokens, length - offered.cached_tokens, draws=1)
    return length / view.latency.added_s(work)


def _kept_slots(view: View) -> int:
    """Slots that offline requests leave to learning."""
    most = view.budgets.max_sequences
    return min(max(1, int(_KEPT_SHARE * most)), most - 1)


def _is_offline(seq: Sequence) -> bool:
    return seq.request.work_class is WorkClass.OFFLINE
