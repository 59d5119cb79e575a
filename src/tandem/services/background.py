"""What works while nobody asks: recovery at the start, then learning and fine-tuning jobs.

Knows the order of starting and stopping, not the work. Invariant: nothing learns before the state
that a crash may have left is in order, and the store is closed last.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tandem.services.jobs.service import Jobs
from tandem.services.learning.learner import Learner
from tandem.services.learning.recovery import Reconciler, Recovered, recover
from tandem.services.learning.tools import LearningTools
from tandem.services.learning.watch import Watch
from tandem.services.versions import Versions

logger = logging.getLogger(__name__)


class Background:
    """The background work of one server; `directory` is the store's.

    With learning off (`learns`), versions that exist are served and nothing else is done.
    """

    def __init__(
        self,
        tools: LearningTools,
        learner: Learner,
        versions: Versions,
        jobs: Jobs,
        directory: Path,
        *,
        learns: bool,
    ) -> None:
        self.tools = tools
        self._directory = directory
        self._learns = learns
        self.learner = learner
        self.versions = versions
        self.jobs = jobs
        self._watch = Watch(tools, learner)
        self._reconciler = Reconciler(tools, learner)

    async def start(self) -> Recovered:
        """Put the state in order and begin. The engine is ready. What recovery found."""
        found = await recover(self.tools, self._directory)
        if found.versions or found.samples or found.directories or found.lost:
            logger.info("recovered", extra={"fields": {"found": str(found)}})
        await self.versions.announce_all()
        self._reconciler.start()
        if self._learns:
            await self.learner.start()
            self._watch.start()
            await self.jobs.start()
        return found

    async def stop(self) -> None:
        """End the work (a version that is just being published is finished), close the store."""
        await self._reconciler.stop()
        await self._watch.stop()
        await self.jobs.stop()
        await self.learner.stop()
        await asyncio.to_thread(self.tools.store.close)
