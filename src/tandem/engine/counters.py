"""Counts what an engine loop has done since it started, for its statistics.

Knows no plan. Invariant: totals only grow.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 1 << 30)


@dataclass(slots=True)
class Counters:
    """Totals since the start. Seconds are those of the loop's timer."""

    iterations: int = 0
    iteration_tokens_sum: int = 0
    iteration_tokens_hist: dict[int, int] = field(default_factory=dict)
    schedule_s: float = 0.0
    execute_s: float = 0.0
    check_failures: int = 0

    def count(self, tokens: int, schedule_s: float, execute_s: float) -> None:
        """Count one more iteration."""
        bucket = _TOKEN_BUCKETS[bisect_left(_TOKEN_BUCKETS, tokens)]
        self.iterations += 1
        self.iteration_tokens_sum += tokens
        histogram = self.iteration_tokens_hist
        histogram[bucket] = histogram.get(bucket, 0) + 1
        self.schedule_s += schedule_s
        self.execute_s += execute_s
