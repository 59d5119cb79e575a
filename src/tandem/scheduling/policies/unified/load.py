"""How busy online prompts keep the device, and when the last one started.

Knows times only, and chooses nothing. Invariant: a period in which no request waits gives the same
share whether it is noted once or in parts, so a simulator may leap over it.
"""

from __future__ import annotations

import math

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.queues import is_prompt, is_waiting
from tandem.scheduling.view import View

# From this share on there is overload: not every request may be served in time.
RUSH = 0.5
# Time constant of the share, in seconds: it follows the present burst, not the hour.
_LATELY_S = 3.0


class Load:
    """`busy` is the share of recent time spent in iterations that were decided while an online
    request waited; the latest seconds count most. It is the utilisation of the prompts' queue.
    Decodes while no request waits do not count, since prompts can join them. Time in which prompts
    are deferred to protect answers does count. `began_s` is the time at which a prompt last
    started."""

    def __init__(self) -> None:
        self.began_s = -math.inf
        self._first: Sequence | None = None  # the first prompt offered for the last plan
        self._busy = 0.0  # at `_at_s`; no request has waited since
        self._at_s = 0.0
        self._noted_s = 0.0
        self._waited = False
        self._last_step: int | None = None

    @property
    def busy(self) -> float:
        """The share at the time of the last `note`."""
        return self._busy * math.exp((self._at_s - self._noted_s) / _LATELY_S)

    def note(self, view: View) -> None:
        """Called once per decision, before it is made."""
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
        """These are batched in the plan that is being made. They start in this order."""
        self._first = next(filter(is_prompt, joining), None)


def _busy_s(view: View, passed_s: float, waits: bool, *, ran: bool) -> float:
    """Busy seconds since a decision in which a request waited. If an iteration `ran`, they are its
    duration, since the device may have idled after it. Otherwise they are all seconds if a request
    still waits."""
    if not ran:
        return passed_s if waits else 0.0
    return min(passed_s, max([result.elapsed_s for result in view.last_results], default=0.0))


def last_step(view: View) -> int | None:
    """Number of the iteration that ended last. A number instead of its plan: freeing the spans of a
    kept plan would slow the next decision."""
    return None if view.last_plan is None else view.last_plan.step


def _online(in_order: list[Sequence]) -> bool:
    """Whether an online sequence is among these, by class and arrival."""
    return bool(in_order) and in_order[0].request.work_class is WorkClass.ONLINE
