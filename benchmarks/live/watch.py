"""Follows an adapter from its first feedback until it has learned, probing versions as they come.

Knows the API and what an answer is, not what is taught. Invariant: times count from `began`, on a
monotonic clock, and a version is probed while it answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.live.api import Api, Learner

Probe = Callable[[int], Awaitable[dict[str, Any]]]
"""Looks at a version, by number, that has just begun to answer."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When learning has ended: no sample waits, or those that wait were not taken for `quiet_s`; at
    the latest after `limit_s`. `every_s`: how often it is looked at."""

    quiet_s: float = 90.0
    limit_s: float = 900.0
    every_s: float = 0.5


@dataclass(slots=True)
class Watched:
    """What came of it: seconds until the end, how it ended, samples by state, and what each probe
    found (with `version` and `at_s`)."""

    seconds: float = 0.0
    ended: str = ""
    samples: dict[str, int] = field(default_factory=dict)
    probes: list[dict[str, Any]] = field(default_factory=list)


class Watch:
    """One adapter. `finished` is set once all feedback has been sent: it ends no earlier."""

    def __init__(self, api: Api, adapter: str, probe: Probe, patience: Patience) -> None:
        self._api = api
        self._adapter = adapter
        self._probe = probe
        self._patience = patience
        self._began_s = time.monotonic()
        self.finished = asyncio.Event()

    @property
    def now_s(self) -> float:
        """Seconds since this was made."""
        return time.monotonic() - self._began_s

    async def run(self) -> Watched:
        """Until learning has ended."""
        watched, seen, moved_s = Watched(), 0, 0.0
        before: Learner | None = None
        while True:
            learner = await self._api.learner(self._adapter)
            if learner.version not in (seen, 0):
                seen = learner.version
                at_s = self.now_s
                found = await self._probe(seen)
                watched.probes.append({"version": seen, "at_s": at_s, **found})
            if learner != before:
                before, moved_s = learner, self.now_s
            watched.ended = self._ended(learner, moved_s)
            if watched.ended:
                watched.seconds, watched.samples = self.now_s, learner.samples
                return watched
            await asyncio.sleep(self._patience.every_s)

    def _ended(self, learner: Learner, moved_s: float) -> str:
        if self.now_s > self._patience.limit_s:
            return "limit"
        if not self.finished.is_set():
            return ""
        if not learner.open:
            # What is committed as learned may answer only a moment later.
            arriving = not learner.version and learner.samples.get("consumed")
            return "" if arriving else "learned"
        idle = not learner.samples.get("assigned", 0)
        return "quiet" if idle and self.now_s - moved_s > self._patience.quiet_s else ""
