"""Puts the state in order when the server starts: what was half done is undone or finished.

The database decides: a directory that no row names never became a version. Idempotent, so that a
crash during recovery needs no recovery of its own. Invariant: afterwards the engine serves the
current version of every adapter, and no sample is assigned but those of candidates that wait.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import AdapterError
from tandem.core.learning import EventRecord, VersionRecord
from tandem.services.learning.base import compare_base
from tandem.services.learning.loaded import settle_loaded
from tandem.services.learning.tools import LearningTools
from tandem.services.retention import trim_versions
from tandem.store import Connection, adapters, events, jobs, samples

logger = logging.getLogger(__name__)


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
    await trim_versions(tools.store)
    serving: list[str] = []
    lost: list[str] = []
    await settle_loaded(tools)
    current = await tools.store.read(_current)
    await compare_base(tools, directory, current)
    for version in current:
        label = f"{version.adapter}@{version.number}"
        try:
            await tools.publisher.adopt(version)
        except AdapterError as error:
            lost.append(label)
            logger.error("cannot load %s: %s", label, error)
            message = f"version {version.number} cannot be loaded: {error}"
            event = EventRecord(version.adapter, tools.now(), "error", message)
            await tools.store.write(events.add, event)
            continue
        serving.append(label)
        tools.metrics.version.labels(version.adapter).set(version.number)
        tools.metrics.measured(version.adapter, version.metrics)
    return Recovered(given_back, tuple(removed), tuple(serving), tuple(lost))


def remove_orphans(directory: Path, known: set[str]) -> list[str]:
    """Remove directories of versions or checkpoints that no row names; what cannot be removed is no
    reason not to start. Blocks."""
    removed: list[str] = []
    for path in sorted(directory.glob("*/*")) if directory.is_dir() else []:
        if str(path) in known or not path.is_dir():
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            logger.error("%s cannot be removed", path, exc_info=error)
        else:
            removed.append(str(path))
    return removed


def _current(connection: Connection) -> list[VersionRecord]:
    found = []
    for record in adapters.listed(connection):
        version = adapters.version(connection, record.name, record.current)
        if version is not None:
            found.append(version)
    return found
