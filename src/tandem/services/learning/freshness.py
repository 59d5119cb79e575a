"""Freshness: how long after feedback was stored its effect is first seen in an answer.

Remembers, for each published version, when its feedback was stored, until an answer names it or one
that was trained on from it. Knows no store. Invariant: each sample is observed at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.learning import VersionRecord
from tandem.core.version import AdapterVersion
from tandem.telemetry.learning import LearningMetrics

_KEPT = 1000


@dataclass(frozen=True, slots=True)
class _Unseen:
    """What no answer has shown yet: feedback stored at these times, and what came before it."""

    adapter: str
    parent: str
    stored_s: tuple[float, ...]


class Freshness:
    """Joins published versions with the answers they give. `now` is in seconds since the epoch."""

    def __init__(self, metrics: LearningMetrics, now: Callable[[], float]) -> None:
        self.metrics = metrics
        self._now = now
        self._unseen: dict[str, _Unseen] = {}

    def published(self, version: VersionRecord, stored_s: Sequence[float]) -> None:
        """`version` may answer from now on and is the first that has learned from feedback stored
        at these times (none: a job's, say); what its ancestors have learned is in it too."""
        parent = _label(version.adapter, version.parent)
        unseen = _Unseen(version.adapter, parent, tuple(stored_s))
        self._unseen[_label(version.adapter, version.number)] = unseen
        while len(self._unseen) > _KEPT:  # versions that nobody asked
            del self._unseen[next(iter(self._unseen))]

    def answered(self, label: str) -> None:
        """A version wrote an answer."""
        while (unseen := self._unseen.pop(label, None)) is not None:
            freshness = self.metrics.freshness.labels(unseen.adapter)
            for stored_s in unseen.stored_s:
                freshness.observe(max(0.0, self._now() - stored_s))
            label = unseen.parent


def _label(adapter: str, number: int) -> str:
    return AdapterVersion(adapter, number, "", "").label
