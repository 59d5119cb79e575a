"""Offline requests: which may take part, and what a millisecond of each is worth.

They have no objective and use what online requests leave. Reads the view, changes nothing.
"""

from __future__ import annotations

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.work import PassWork
from tandem.scheduling.queues import is_waiting, num_online
from tandem.scheduling.view import View

# Waiting offline requests that are compared in an iteration: it bounds the prefixes to look up.
_COMPARED = 8


def is_offline(seq: Sequence) -> bool:
    """Whether it belongs to an offline request."""
    return seq.request.work_class is WorkClass.OFFLINE


def offline_waiting(view: View) -> list[Sequence]:
    """Waiting offline requests that are considered: the first by arrival."""
    waits = view.waiting_in_order
    begin = num_online(waits)
    return waits[begin : begin + _COMPARED]


def oldest_offline(view: View) -> Sequence | None:
    """The offline request that came first, running or waiting."""
    found = [
        order[place]
        for order in (view.serving, view.waiting_in_order)
        if (place := num_online(order)) < len(order)
    ]
    return min(found, key=lambda seq: seq.order, default=None)


def offline_value(view: View, seq: Sequence, start: int, spare_blocks: float) -> float:
    """Echo's benefit less punishment, per second (5.2), of running the rest of a sequence from
    position `start` on.

    The benefit is the tokens that come of it: one of a decode, all of a prompt, those of a cached
    prefix included. The punishment is the tokens that would have to be computed again: those beyond
    `spare_blocks`, the blocks that online requests will not want back.
    """
    latency, length = view.latency, len(seq.tokens)
    if seq.decoding:
        return 1.0 / latency.added_decode_s(length)
    work = PassWork()
    work.span(start, length - start, draws=1)
    lost = 0.0
    if is_waiting(seq):
        lost = max(0.0, min(length, length - spare_blocks * view.block_size))
    return (length - lost) / latency.added_s(work)
