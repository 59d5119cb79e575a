"""Puts the state in order when the server starts: what was half done is undone or finished.

The database decides: a directory that no row names never became a version. Idempotent, so that a
crash during recovery needs no recovery of its own. Invariant: afterwards the engine serves the
current version of every adapter, and no sample is assigned but those of candidates that wait.
`Reconciler` sees to the former while the server runs.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from tandem.adapters.archives import EXPORTS
from tandem.core.errors import StoreError, TandemError
from tandem.core.ports import EngineState
from tandem.services.learning.base import compare_base
from tandem.services.learning.learner import Learner
from tandem.services.learning.loaded import settle_loaded
from tandem.services.learning.publish import current_versions
from tandem.services.learning.strays import remove_strays
from tandem.services.learning.tools import LearningTools
from tandem.services.versions.retention import trim_versions
from tandem.store import adapters, jobs, samples

logger = logging.getLogger(__name__)

LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was found: samples given back, directories removed, versions that answer again, and
    those whose files cannot be read."""

    samples: int
    directories: tuple[str, ...]
    versions: tuple[str, ...]
    lost: tuple[str, ...]


async def recover(tools: LearningTools, directory: Path) -> Recovered:
    """Do it. The engine is ready and nobody learns or asks yet."""
    given_back = await tools.store.write(samples.release, None)
    known = {record.path for record in await tools.store.read(adapters.versions)}
    removed = await asyncio.to_thread(remove_orphans, directory / "adapters", known)
    committed = await tools.store.read(jobs.directories)
    removed += await asyncio.to_thread(remove_orphans, directory / "jobs", committed)
    await asyncio.to_thread(shutil.rmtree, directory / EXPORTS, ignore_errors=True)
    await trim_versions(tools.store)
    serving: list[str] = []
    lost: list[str] = []
    await settle_loaded(tools)
    current = await tools.store.read(current_versions)
    await compare_base(tools, directory, current)
    for version in current:
        label = f"{version.adapter}@{version.number}"
        try:
            await tools.publisher.adopt(version)
        except StoreError:
            raise
        except TandemError as error:  # no memory for it now, for one; the reconciler tries again
            lost.append(label)
            message = f"version {version.number} cannot be loaded: {error}"
            await tools.tell(version.adapter, "error", message)
            continue
        serving.append(label)
        tools.metrics.version.labels(version.adapter).set(version.number)
        tools.metrics.measured(version.adapter, version.metrics)
    return Recovered(given_back, tuple(removed), tuple(serving), tuple(lost))


def remove_orphans(directory: Path, known: set[str]) -> list[str]:
    """Remove what no row names of all adapters or jobs. Blocks."""
    folders = sorted(directory.iterdir()) if directory.is_dir() else []
    return [removed for folder in folders for removed in remove_strays(folder, known)]


class Reconciler:
    """Looks now and then whether every adapter answers with its current version, and mends it.

    Publishing sees to that itself. This is for what fails on the way, such as an engine that had no
    memory for a version when it came back.
    """

    def __init__(self, tools: LearningTools, learner: Learner) -> None:
        self._tools = tools
        self._learner = learner
        self._told: dict[str, str] = {}
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look now and then, until `stop`."""
        self._looking = asyncio.create_task(self._look_on(), name="current versions")

    async def stop(self) -> None:
        """End it; what is being adopted is given up."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception as error:  # or nobody would look again
                logger.warning("cannot look which versions answer: %s", error)

    async def look(self) -> None:
        """Once. Raises `StoreError`."""
        if self._tools.client.state is EngineState.READY:
            behind = await self._tools.publisher.behind()
            await asyncio.gather(*(self._catch_up(name) for name in behind))

    async def _catch_up(self, name: str) -> None:
        problem = ""
        try:
            async with self._learner.settled(name):
                adopted = await self._tools.publisher.catch_up(name)
        except TandemError as error:
            problem = f"{name} does not answer with its current version: {error}"
        else:
            if adopted is not None:
                self._tools.metrics.version.labels(name).set(adopted)
                logger.warning("%s answers with its current version %d again", name, adopted)
        if problem and problem != self._told.get(name):  # once, however often it is tried
            logger.error("%s", problem)
        self._told[name] = problem
