"""Recent prediction errors, as every estimator reports them.

Knows neither what is predicted nor its unit. Invariant: errors are relative to the observation.
"""

from __future__ import annotations

import math
from collections import deque

from tandem.core.events import PredictionError

_DECAY = 0.05
# Number of samples that `p95` covers.
_WINDOW = 256


class RelativeErrors:
    """Statistics of (predicted - observed) / observed over about the last twenty `samples`: `bias`
    is the mean, `mean` is the mean absolute value; nan before the first sample."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=_WINDOW)
        self.samples = 0
        self.bias = math.nan
        self.mean = math.nan

    def count(self, predicted: float, observed: float) -> None:
        """Add a prediction and its observation, which is not 0."""
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
        """95th percentile of recent absolute errors; nan before the first sample."""
        if not self._latest:
            return math.nan
        ordered = sorted(self._latest)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def report(self) -> PredictionError:
        """All current values."""
        return PredictionError(self.bias, self.mean, self.p95, self.samples)
