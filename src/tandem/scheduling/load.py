"""How busy online prompts keep the device: what one second that is lost costs those still to come.

Knows times only, and chooses nothing. Invariant: the share after a stretch in which nobody waits is
that after any parts of it, so that a simulator may leap over them.
"""

from __future__ import annotations

import math

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.view import View

# The share is of about so many seconds: of the burst that there is, not of the hour.
_LATELY_S = 3.0


class Load:
    """`busy` is the share of the last seconds, the latest counting most, that went to iterations
    for which an online request waited when they were decided: a queue's server. Answers that
    decode are none of it, since prompts can join them."""

    def __init__(self) -> None:
        self.busy = 0.0
        self._noted_s: float | None = None
        self._waited = False
        self._last_step: int | None = None

    def note(self, view: View) -> None:
        """Once a decision, before it is made."""
        now, waits, step = view.now, _online(view.waiting_in_order), _last_step(view)
        if self._noted_s is not None:
            passed_s = now - self._noted_s
            ran = step != self._last_step
            busy_s = _busy_s(view, passed_s, waits, ran=ran) if self._waited else 0.0
            self.busy = 1.0 - (1.0 - self.busy) * math.exp(-busy_s / _LATELY_S)
            self.busy *= math.exp((busy_s - passed_s) / _LATELY_S)
        self._noted_s, self._waited, self._last_step = now, waits, step


def _busy_s(view: View, passed_s: float, waits: bool, *, ran: bool) -> float:
    """Of the time since a decision when one waited: the iteration's, after which there may have
    been nothing to do; without one, all if one waits still."""
    if not ran:
        return passed_s if waits else 0.0
    return min(passed_s, max([result.elapsed_s for result in view.last_results], default=0.0))


def _last_step(view: View) -> int | None:
    """Which iteration ended last. A number: who keeps its plan pays for ending its spans when the
    next one is decided."""
    return None if view.last_plan is None else view.last_plan.step


def _online(in_order: list[Sequence]) -> bool:
    """Whether there is an online one among these, by class and arrival."""
    return bool(in_order) and in_order[0].request.work_class is WorkClass.ONLINE
