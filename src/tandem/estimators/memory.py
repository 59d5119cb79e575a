"""How many KV blocks requests will want soon: mu + 2 sigma of what they held lately (Echo 5.3).

The cache counts the present exactly; this estimates the future. Knows numbers and times only.
Invariant: samples are older than the window only if there is a single one.
"""

from __future__ import annotations

import math
from collections import deque

from tandem.estimators.errors import RelativeErrors

# How far above the mean; 98% of a normal distribution lies below.
SIGMAS = 2.0


class DemandWindow:
    """Demand over the last `window_s` seconds, with at most one sample every `interval_s` seconds.

    `errors` compares the mean with the next sample; samples of 0 blocks are left out.
    """

    def __init__(self, window_s: float = 3600.0, interval_s: float = 1.0) -> None:
        assert window_s > 0.0 and 0.0 < interval_s <= window_s
        self._window_s = window_s
        self._interval_s = interval_s
        self._samples: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._squares = 0
        self._due_s = -math.inf
        self.errors = RelativeErrors()

    def due(self, now: float) -> bool:
        """Whether another sample is due."""
        return now >= self._due_s

    def observe(self, now: float, blocks: int) -> None:
        """Add a sample: `blocks` are held at `now`. Ignored if no sample is due."""
        if not self.due(now):
            return
        if self._samples and blocks:
            self.errors.count(self._sum / len(self._samples), blocks)
        self._due_s = now + self._interval_s
        self._samples.append((now, blocks))
        self._sum += blocks
        self._squares += blocks * blocks
        while now - self._samples[0][0] > self._window_s:
            _, gone = self._samples.popleft()
            self._sum -= gone
            self._squares -= gone * gone

    @property
    def demand(self) -> float:
        """Blocks that requests will almost never exceed; 0 before the first sample."""
        count = len(self._samples)
        if not count:
            return 0.0
        mean = self._sum / count
        variance = max(0.0, self._squares / count - mean * mean)
        return mean + SIGMAS * math.sqrt(variance)
