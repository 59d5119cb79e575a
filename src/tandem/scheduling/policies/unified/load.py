"""How busy online prompts keep the device.

Knows times only, and chooses nothing. Invariant: a period in which no request waits gives the same
share whether it is noted once or in parts, so a simulator may leap over it.
"""

from __future__ import annotations

import math

from tandem.core.slo import WorkClass
from tandem.scheduling.view import View

# From this share on there is overload: not every request may be served in time.
OVERLOAD = 0.5
# Time constant of the share, in seconds: it follows the present burst, not the hour.
_LATELY_S = 3.0


class Load:
    """`busy` is the share of recent time spent in iterations that were decided while an online
    request waited; the latest seconds count most. It is the utilisation of the prompts' queue.
    Decodes while no request waits do not count, since prompts can join them."""

    def __init__(self) -> None:
        self._busy = 0.0  # at `_at_s`; no request has waited since
        self._at_s = self._noted_s = 0.0
        self._waited = False
        self._step: int | None = None  # the iteration that had ended

    @property
    def busy(self) -> float:
        """The share at the time of the last `note`."""
        return self._busy * math.exp((self._at_s - self._noted_s) / _LATELY_S)

    def note(self, view: View) -> None:
        """Called once per decision, before it is made."""
        now, first = view.now, view.waiting_in_order[:1]
        waits = bool(first) and first[0].request.work_class is WorkClass.ONLINE
        if self._waited:
            passed_s = now - self._noted_s
            busy_s = passed_s if waits else 0.0
            if last_step(view) != self._step:  # the device may have idled after the iteration
                busy_s = min(passed_s, max([each.elapsed_s for each in view.last_results] or [0.0]))
            busy = 1.0 - (1.0 - self.busy) * math.exp(-busy_s / _LATELY_S)
            self._busy = busy * math.exp((busy_s - passed_s) / _LATELY_S)
            self._at_s = now
        self._noted_s, self._waited, self._step = now, waits, last_step(view)


def last_step(view: View) -> int | None:
    """Number of the iteration that ended last. A number instead of its plan: freeing the spans of a
    kept plan would slow the next decision."""
    return None if view.last_plan is None else view.last_plan.step
