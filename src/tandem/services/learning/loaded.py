"""Adapters that were loaded with `--adapter` or over HTTP, and whose name also learns.

Before learning first touches such an adapter, its files are copied into the store as a version,
with the number that it already answers under, or the next free one. Knows no training. Invariant: a
label always means the same content, so roll back and restart find what answered before learning.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from tandem.adapters.archives import copy
from tandem.adapters.files import inspect_adapter
from tandem.core.errors import AdapterError, DiskError, StoreError
from tandem.core.learning import (
    IMPORTED,
    AdapterRecord,
    EventRecord,
    VersionRecord,
    VersionState,
)
from tandem.core.version import AdapterVersion
from tandem.services.learning.publish import Conclusion, remove_tree
from tandem.services.learning.tools import LearningTools
from tandem.services.tasks import uninterrupted
from tandem.store import Connection, adapters

logger = logging.getLogger(__name__)

_AGAIN_S = 60.0
_LONGEST_S = 3600.0


class NotCopied(StoreError):
    """The disk could not take the files of a loaded adapter; a retry may succeed."""


class Keeper:
    """Saves the adapter that was loaded as `name` as a version, and retries with back-off.

    After a failure it raises the same error for one minute, then twice as long each time, up to an
    hour.
    """

    def __init__(self, name: str, tools: LearningTools) -> None:
        self._name = name
        self._tools = tools
        self._refused: AdapterVersion | None = None
        self._problem: AdapterError | NotCopied = AdapterError("")
        self._wait_s = 0.0
        self._failed_s = 0.0

    async def keep(self) -> bool:
        """Whether an adapter was saved. Raises as `keep_loaded`; in back-off the last error."""
        loaded, now_s = await loaded_by_hand(self._tools, self._name), self._tools.now()
        known = loaded is not None and loaded == self._refused
        if known and abs(now_s - self._failed_s) < self._wait_s:  # the clock may be set back
            raise self._problem.with_traceback(None)  # else it would grow
        try:
            return await keep_loaded(self._tools, self._name)
        except (AdapterError, NotCopied) as error:
            self._wait_s = min(2 * self._wait_s, _LONGEST_S) if known else _AGAIN_S
            self._refused, self._problem, self._failed_s = loaded, error, now_s
            raise


async def loaded_by_hand(tools: LearningTools, name: str) -> AdapterVersion | None:
    """The adapter that answers as `name` but is not a version; None once `name` has a published
    version."""
    published = await tools.store.read(_published, name)
    return None if published else tools.client.adapters.get(name)


async def keep_loaded(tools: LearningTools, name: str) -> bool:
    """Save the loaded adapter as a version, creating its record if needed. False if there is none.

    Nothing else may work on `name` meanwhile. Raises `AdapterError` if its files are gone or have
    changed since it was loaded, `NotCopied`, and `StoreError`.
    """
    loaded = await loaded_by_hand(tools, name)
    if loaded is not None:
        await uninterrupted(_keep(tools, loaded))
    return loaded is not None


async def settle_loaded(tools: LearningTools) -> None:
    """At the start: turn what `--adapter` loaded into a version if none was published of it.

    If versions exist but none is current, unload it, so that the base answers. If one is current,
    recovery has published it in its place.
    """
    for record in await tools.store.read(adapters.listed):
        loaded = tools.client.adapters.get(record.name)
        if loaded is None:
            continue
        published = await tools.store.read(_published, record.name)
        if not published:
            try:
                await keep_loaded(tools, record.name)
            except (AdapterError, NotCopied) as error:
                logger.error("%s", error)
        elif loaded.content_hash not in {version.content_hash for version in published}:
            logger.warning(
                "'%s' has versions of its own, and the adapter loaded from %s is none of them. It "
                "is not served. Import it as a version, or start without --adapter",
                record.name,
                loaded.path,
            )
        if published and not record.current:
            await tools.publisher.withdraw(record.name)


async def _keep(tools: LearningTools, loaded: AdapterVersion) -> None:
    name, publisher, now_s = loaded.name, tools.publisher, tools.now()
    adapter = AdapterRecord(name, now_s)
    aside = await publisher.staging_path(name, 0)  # no version has number 0
    try:
        await asyncio.to_thread(_copy, loaded, aside)
    except (AdapterError, DiskError, OSError) as error:
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
        await tools.store.write(adapters.pass_over, adapter, loaded.number)
        why = str(error).replace(loaded.path, "the adapter")  # clients read it
        logger.info("%s was loaded from %s", loaded.label, loaded.path)
        problem = f"the loaded adapter {loaded.label} cannot be saved as a version: {why}"
        if isinstance(error, AdapterError | FileNotFoundError):
            raise AdapterError(f"{problem}; import it again") from error
        raise NotCopied(f"{problem}; the server will retry") from error
    number = await tools.store.write(adapters.begin_version, adapter, loaded.number)
    await asyncio.to_thread(aside.rename, await publisher.staging_path(name, number))
    version = VersionRecord(
        adapter=name,
        number=number,
        content_hash=loaded.content_hash,
        path=str(publisher.path(name, number)),
        created_s=now_s,
        state=VersionState.CANDIDATE,
        origin=IMPORTED,
    )
    logger.info("version %d of %s was loaded from %s", number, name, loaded.path)
    message = f"version {number} was made from the loaded adapter"
    event = EventRecord(name, now_s, "info", message, {"version": number})
    await publisher.publish(Conclusion(version, (), (), event))
    tools.metrics.version.labels(name).set(number)


def _copy(loaded: AdapterVersion, target: Path) -> None:
    remove_tree(target)
    copy(Path(loaded.path), target)
    if inspect_adapter(target).content_hash != loaded.content_hash:
        raise AdapterError("its files have changed since it was loaded")


def _published(connection: Connection, name: str) -> list[VersionRecord]:
    known = adapters.versions(connection, name)
    return [version for version in known if version.state is VersionState.PUBLISHED]
