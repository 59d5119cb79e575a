"""Freshness: how long after feedback was stored its effect is first seen in an answer.

Remembers, for each published version, when its feedback was stored, until an answer names it.
Knows no store. Invariant: each sample is observed at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.telemetry.learning import LearningMetrics

_KEPT = 1000


class Freshness:
    """Joins published versions with the answers they give. `now` is in seconds since the epoch."""

    def __init__(self, metrics: LearningMetrics, now: Callable[[], float]) -> None:
        self.metrics = metrics
        self._now = now
        self._waiting: dict[str, tuple[str, tuple[float, ...]]] = {}

    def published(self, adapter: str, label: str, stored_s: Sequence[float]) -> None:
        """`label` answers from now on and has learned from feedback stored at these times."""
        if stored_s:
            self._waiting[label] = (adapter, tuple(stored_s))
        while len(self._waiting) > _KEPT:  # versions that nobody asked
            del self._waiting[next(iter(self._waiting))]

    def answered(self, label: str) -> None:
        """A version wrote an answer."""
        waiting = self._waiting.pop(label, None)
        if waiting is not None:
            adapter, stored = waiting
            for stored_s in stored:
                self.metrics.freshness.labels(adapter).observe(max(0.0, self._now() - stored_s))
