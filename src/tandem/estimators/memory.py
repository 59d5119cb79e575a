"""How many KV blocks requests will want soon: mu + 2 sigma of what they held lately (Echo 5.3).

The present is exact in the cache's own account; this is about the future. Knows numbers and times
only. Invariant: samples are older than the window only if there is a single one.
"""

from __future__ import annotations

import math
from collections import deque

# How far above the mean; 95% of a normal distribution lies below.
SIGMAS = 2.0


class DemandWindow:
    """Demand over the last `window_s` seconds, one sample every `interval_s` at most."""

    def __init__(self, window_s: float = 3600.0, interval_s: float = 1.0) -> None:
        assert window_s > 0.0 and 0.0 < interval_s <= window_s
        self._window_s = window_s
        self._interval_s = interval_s
        self._samples: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._squares = 0
        self.bias = math.nan
        self.error = math.nan

    def observe(self, now: float, blocks: int) -> None:
        """`blocks` are held at `now`; ignored if the last sample is younger than the interval."""
        if self._samples and now - self._samples[-1][0] < self._interval_s:
            return
        if self._samples:
            self._judge(blocks)
        self._samples.append((now, blocks))
        self._sum += blocks
        self._squares += blocks * blocks
        while now - self._samples[0][0] > self._window_s:
            _, gone = self._samples.popleft()
            self._sum -= gone
            self._squares -= gone * gone

    @property
    def demand(self) -> float:
        """Blocks that requests will hold at most, nearly always; 0 before the first sample."""
        count = len(self._samples)
        if not count:
            return 0.0
        mean = self._sum / count
        variance = max(0.0, self._squares / count - mean * mean)
        return mean + SIGMAS * math.sqrt(variance)

    def _judge(self, blocks: int) -> None:
        """How far the mean was from what came, relative to it; a decaying mean."""
        mean = self._sum / len(self._samples)
        relative = (mean - blocks) / max(blocks, 1)
        if math.isnan(self.error):
            self.bias, self.error = relative, abs(relative)
            return
        self.bias += 0.05 * (relative - self.bias)
        self.error += 0.05 * (abs(relative) - self.error)
