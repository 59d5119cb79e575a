"""How busy online requests keep the device: what one second that is lost costs those still to come.

Knows times only, and chooses nothing. Invariant: the share after one stretch of running requests is
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
    """`busy` is the share of the last seconds, the latest counting most, in which online requests
    ran or could have run; what learning takes beside them is in it, what it takes alone is not."""

    def __init__(self) -> None:
        self.busy = 0.0
        self._noted_s = math.inf
        self._served = False

    def note(self, view: View) -> None:
        """Once a decision, before it is made."""
        passed_s = view.now - self._noted_s
        runs = _online(view.serving)
        if passed_s > 0.0:
            busy_s = passed_s if runs else self._last_s(view) if self._served else 0.0
            kept = math.exp(-passed_s / _LATELY_S)
            self.busy = kept * self.busy + (1.0 - kept) * min(1.0, busy_s / passed_s)
        self._noted_s = view.now
        self._served = runs or _online(view.waiting_in_order)

    @staticmethod
    def _last_s(view: View) -> float:
        """What the last iteration took: the one in which the last requests ended."""
        return max([result.elapsed_s for result in view.last_results], default=0.0)


def _online(in_order: list[Sequence]) -> bool:
    """Whether there is an online one among these, by class and arrival."""
    return bool(in_order) and in_order[0].request.work_class is WorkClass.ONLINE
