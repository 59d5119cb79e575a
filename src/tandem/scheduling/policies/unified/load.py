"""How busy online prompts keep the device, what one second that is lost costs those still to come,
and when the last one started.

Knows times only, and chooses nothing. Invariant: the share after a stretch in which nobody waits is
that after any parts of it, so that a simulator may leap over them.
"""

from __future__ import annotations

import math

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.queues import is_prompt, is_waiting
from tandem.scheduling.view import View

# From so large a share on there is a rush: not all that come may be served in time.
RUSH = 0.5
# The share is of about so many seconds: of the burst that there is, not of the hour.
_LATELY_S = 3.0


class Load:
    """`busy` is the share of the last seconds, the latest counting most, that went to iterations
    for which an online request waited when they were decided: a queue's server. Answers that
    decode while none waits are none of it, since prompts can join them; while prompts are held
    back for their sake they are. A prompt last started at `began_s`."""

    def __init__(self) -> None:
        self.began_s = -math.inf
        self._first: Sequence | None = None  # of the prompts that were to join the last plan
        self._busy = 0.0  # at `_at_s`; since then nobody waited
        self._at_s = 0.0
        self._noted_s = 0.0
        self._waited = False
        self._last_step: int | None = None

    @property
    def busy(self) -> float:
        """See the class; when it was last noted."""
        return self._busy * math.exp((self._at_s - self._noted_s) / _LATELY_S)

    def note(self, view: View) -> None:
        """Once a decision, before it is made."""
        now, waits = view.now, _online(view.waiting_in_order)
        if self._first is not None and not is_waiting(self._first):
            self.began_s = self._noted_s
        self._first = None
        if self._waited:
            passed_s = now - self._noted_s
            busy_s = _busy_s(view, passed_s, waits, ran=last_step(view) != self._last_step)
            busy = 1.0 - (1.0 - self.busy) * math.exp(-busy_s / _LATELY_S)
            self._busy = busy * math.exp((busy_s - passed_s) / _LATELY_S)
            self._at_s = now
        self._noted_s, self._waited = now, waits
        if waits:
            self._last_step = last_step(view)

    def offer(self, joining: list[Sequence]) -> None:
        """These are to join the plan that is being made. Whoever stands first starts first."""
        self._first = next(filter(is_prompt, joining), None)


def _busy_s(view: View, passed_s: float, waits: bool, *, ran: bool) -> float:
    """Of the time since a decision when one waited: the iteration's, after which there may have
    been nothing to do; without one, all if one waits still."""
    if not ran:
        return passed_s if waits else 0.0
    return min(passed_s, max([result.elapsed_s for result in view.last_results], default=0.0))


def last_step(view: View) -> int | None:
    """Which iteration ended last. A number: who keeps its plan pays for ending its spans when the
    next one is decided."""
    return None if view.last_plan is None else view.last_plan.step


def _online(in_order: list[Sequence]) -> bool:
    """Whether there is an online one among these, by class and arrival."""
    return bool(in_order) and in_order[0].request.work_class is WorkClass.ONLINE
