"""Deletes files that learning no longer needs: old versions, and unread states of optimisers.

Training continues from the current version, or from its parent after a roll back. The optimiser
states of other versions and of ended jobs are never read, and each is twice an adapter's size.
Knows no engine. Invariant: these versions stay and can answer: the current one, its parent,
candidates, references, and versions that a batch or a job uses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tandem.core.errors import StoreError
from tandem.core.learning import EventRecord, JobStatus, VersionRecord, VersionState
from tandem.services.learning.settings import BASE, reference_number
from tandem.store import Connection, Store, adapters, batches, events, jobs, samples

Subject = TypeVar("Subject")

logger = logging.getLogger(__name__)

_OPTIMISER = ("optimizer.safetensors", "trainer_state.json")
"""As `training/checkpoint.py` writes them; it takes both or none."""
_ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class Retention:
    """`versions`: how many of the newest versions of each adapter are kept (0: all). `reference`:
    for adapters whose settings name none."""

    versions: int = 0
    reference: str = BASE


def forget_versions(
    connection: Connection, adapter: str, retention: Retention, now_s: float
) -> list[VersionRecord]:
    """Forget versions that are old and not needed. The caller deletes their files."""
    record, known = adapters.find(connection, adapter), adapters.versions(connection, adapter)
    if record is None or not retention.versions:
        return []
    reference = record.settings.get("reference", retention.reference)
    needed = {record.current, reference_number(reference)}
    needed |= {each.parent for each in known if each.number == record.current}
    needed |= batches.pinned(connection, adapter).keys()
    needed |= samples.refused_for(connection, adapter)
    gone = [
        adapters.delete_version(connection, adapter, each.number)
        for each in known[: -retention.versions]
        if each.number not in needed
        and each.state is not VersionState.CANDIDATE
        and not jobs.referring(connection, adapter, each.number)
    ]
    if gone:
        said = f"the newest {retention.versions} versions are kept (store.keep_versions); deleted: "
        numbers = [each.number for each in gone]
        message = f"{said}{', '.join(map(str, numbers))}"
        told = EventRecord(adapter, now_s, "info", message, {"versions": numbers})
        events.add(connection, told)
    return gone


async def trim_versions(store: Store, adapter: str | None = None) -> int:
    """Delete optimiser states of old versions of `adapter` (None: of all); bytes freed."""
    return await _trim(store, _old_versions, adapter)


async def trim_jobs(store: Store, job_id: str | None = None) -> int:
    """The same for the checkpoints of an ended job (None: of all)."""
    return await _trim(store, _old_checkpoints, job_id)


async def _trim(
    store: Store, unneeded: Callable[[Connection, Subject], list[str]], subject: Subject
) -> int:
    """A failed deletion is logged and retried later: it must not fail the publication."""
    try:
        return await asyncio.to_thread(drop_optimisers, await store.read(unneeded, subject))
    except (StoreError, OSError) as error:
        logger.error("old optimiser states cannot be removed", exc_info=error)
        return 0


def drop_optimisers(directories: Iterable[str]) -> int:
    """Remove the optimiser's state from directories; bytes freed. Blocks."""
    freed_bytes = 0
    for file in (Path(directory) / name for directory in directories for name in _OPTIMISER):
        if file.is_file():
            freed_bytes += file.stat().st_size
            file.unlink()
    return freed_bytes


def _old_versions(connection: Connection, adapter: str | None) -> list[str]:
    currents = {record.name: record.current for record in adapters.listed(connection)}
    known = adapters.versions(connection, adapter)
    needed = {
        (version.adapter, number)
        for version in known
        if version.number == currents[version.adapter]
        for number in (version.number, version.parent)
    }
    return [
        version.path
        for version in known
        if (version.adapter, version.number) not in needed
        and version.state is not VersionState.CANDIDATE
    ]


def _old_checkpoints(connection: Connection, job_id: str | None) -> list[str]:
    ended = jobs.in_status(connection, _ENDED)
    return [
        path
        for job in ended
        if job_id in (None, job.job_id)
        for path in (*_checkpoints(connection, job.job_id), job.checkpoint_path)
        if path
    ]


def _checkpoints(connection: Connection, job_id: str) -> list[str]:
    return [checkpoint.path for checkpoint in jobs.checkpoints(connection, job_id)]
