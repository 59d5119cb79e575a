"""How far off predictions were lately, in the numbers that every estimator reports.

Knows neither what is predicted nor its unit. Invariant: errors are relative to what was observed.
"""

from __future__ import annotations

import math
from collections import deque

from tandem.core.events import PredictionError

_DECAY = 0.05
# Samples whose errors are kept for `p95`.
_WINDOW = 256


class RelativeErrors:
    """Of (predicted - observed) / observed: `bias` is the mean and `mean` that of the absolute
    value, over about the last twenty `samples`; nan before the first."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_WINDOW)
        self.samples = 0
        self.bias = math.nan
        self.mean = math.nan

    def count(self, predicted: float, observed: float) -> None:
        """Something came out as `observed`, which is not 0."""
        relative = (predicted - observed) / observed
        self._latest.append(abs(relative))
        self.samples += 1
        if self.samples == 1:
            self.bias, self.mean = relative, abs(relative)
            return
        self.bias += _DECAY * (relative - self.bias)
        self.mean += _DECAY * (abs(relative) - self.mean)

    @property
    def p95(self) -> float:
        """What 95% of the absolute values lately were at most; nan before the first."""
        if not self._latest:
            return math.nan
        ordered = sorted(self._latest)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def report(self) -> PredictionError:
        """All of it, as it is now."""
        return PredictionError(self.bias, self.mean, self.p95, self.samples)
