"""How training goes in a simulation: a model of the falling loss.

The margin of a trained pair, beta * (log p(chosen) - log p(rejected) against the reference), rises
from 0 towards `margin` with the number of updates, so DPO's loss falls from log 2:

    margin(n) = margin * (1 - exp(-n / updates))

Documented rather than true: what a run gains depends on data. With a recorded run, its measured
losses are used instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from tandem.core.errors import InvalidRequest


class Curve(Protocol):
    """Of one trainer."""

    def margin(self, updates: int) -> float:
        """Margin of the reference-relative log-probabilities after so many updates, times beta."""
        ...


@dataclass(frozen=True, slots=True)
class Saturating:
    """See the module; `updates` is when 63% of the margin are reached."""

    top: float = 2.0
    updates: float = 50.0

    def margin(self, updates: int) -> float:
        """See `Curve`."""
        return self.top * (1.0 - math.exp(-updates / self.updates))


class Recorded:
    """The losses of a run that was made, one an update; the last one goes on."""

    def __init__(self, losses: list[float]) -> None:
        """DPO losses, above 0. Raises `InvalidRequest`."""
        if not losses or not all(math.isfinite(loss) and loss > 0.0 for loss in losses):
            raise InvalidRequest("a recorded curve needs losses above 0", param="curve")
        # -log sigmoid(m) = loss, solved for m.
        self._margins = [-math.log(max(math.expm1(loss), 1e-12)) for loss in losses]

    def margin(self, updates: int) -> float:
        """See `Curve`."""
        return self._margins[min(updates, len(self._margins) - 1)]
