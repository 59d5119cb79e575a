"""What works while nobody asks: recovery at the start, then learning and fine-tuning jobs.

Knows the order of starting and stopping, not the work. Invariant: nothing learns before the state
that a crash may have left is in order, and the store is closed last.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from tandem.core.errors import InvalidRequest
from tandem.services.jobs.service import Jobs
from tandem.services.learning.canary import Canary
from tandem.services.learning.learner import Learner
from tandem.services.learning.recovery import Reconciler, Recovered, recover
from tandem.services.learning.tools import LearningTools
from tandem.services.learning.watch import Watch
from tandem.services.versions.service import Versions

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
        canary: Canary,
        learns: bool,
    ) -> None:
        self.tools = tools
        self._canary = canary
        self._directory = directory
        self._learns = learns
        self.learner = learner
        self.versions = versions
        self.jobs = jobs
        self._watch = Watch(tools, learner)
        self._reconciler = Reconciler(tools, learner)

    async def start(self) -> Recovered:
        """Put the state in order and begin. The engine is ready. What recovery found.

        Raises `InvalidRequest` if an operator's canary file cannot be used with this model.
        """
        if self._learns:
            await asyncio.to_thread(self._check_canary)
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

    def _check_canary(self) -> None:
        try:
            self._canary.check(self.tools.encoder(self.tools.defaults))
        except InvalidRequest as error:
            if not self._canary.shipped:
                raise
            # Nobody chose it: the model is served, and learns once somebody chooses another.
            logger.error("no version can be published with the shipped canary set: %s", error)

    async def stop(self) -> None:
        """End the work (a version that is just being published is finished), close the store."""
        await self._reconciler.stop()
        await self._watch.stop()
        await self.jobs.stop()
        await self.learner.stop()
        await asyncio.to_thread(self.tools.store.close)
