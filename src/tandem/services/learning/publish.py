"""From files that were written aside to a version that answers: rename, commit, adopt.

The database decides: a directory without a row is nothing, a row without adoption is adopted when
the engine is there. Invariant: a directory named by a row was flushed to disk before the row, and
samples change state in the transaction that makes the row.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.core.errors import AdapterError, DiskError, EngineDead, NotFound, StoreError
from tandem.core.learning import EventRecord, VersionRecord, VersionState
from tandem.core.ports import EngineClient, EngineState, ServingEngine
from tandem.core.version import INTERNAL, AdapterVersion
from tandem.services.durable import flush_directory, make_directory
from tandem.services.learning.strays import remove_strays
from tandem.services.versions.retention import Retention, forget_versions, trim_versions
from tandem.store import Connection, Store, adapters, events

logger = logging.getLogger(__name__)

POINTS = (
    "before rename",
    "after rename",
    "before commit",
    "after commit",
    "before adopt",
    "after adopt",
)
"""Where tests may end the process."""

_ENGINE_POLL_S = 0.1
_MIB = 1 << 20
_LEAST_FREE_BYTES = 16 * _MIB
"""For a first version of unknown size, and for the database beside any."""
_ALL = Retention()


def nothing(point: str) -> None:
    """What happens at a point when nobody tests."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """How a candidate ended: its record, which samples it used first, and all it was trained on.

    After a refusal samples are tried again until they were refused `tries` times.
    """

    record: VersionRecord
    consumed: Sequence[str]
    trained_on: Sequence[str]
    event: EventRecord
    tries: int = 1


def candidate_name(adapter: str) -> str:
    """The engine's name of an adapter's candidate."""
    return f"{INTERNAL}candidate/{adapter}"


def reference_name(adapter: str, number: int) -> str:
    """The engine's name of a version that is a reference."""
    return f"{INTERNAL}reference/{adapter}/{number}"


class NoRoom(AdapterError):
    """One more adapter would be more than the engine serves at the same time."""


class Publisher:
    """Moves candidates to where they stay. `directory` is the store's, `at` is called at each of
    `POINTS`, `max_adapters` is the engine's limit (0: not known), `retention` says which versions
    stay."""

    def __init__(
        self,
        client: EngineClient,
        store: Store,
        directory: Path,
        at: Callable[[str], None] = nothing,
        *,
        max_adapters: int = 0,
        retention: Retention = _ALL,
    ) -> None:
        self._retention = retention
        self._max_adapters = max_adapters
        self._publishing: set[str] = set()
        self._client = client
        self._store = store
        self._directory = directory
        self._at = at

    def require_room(self, adapter: str, ahead: Collection[str] = ()) -> None:
        """Ask before work whose result must be served under `adapter`; those `ahead` of it will be
        served, too. Raises `NoRoom`."""
        loaded = self._client.adapters.values()
        served = {version.name for version in loaded if not version.internal} | self._publishing
        if adapter not in served:
            served |= set(ahead)
        if self._max_adapters and len(served - {adapter}) >= self._max_adapters:
            are = "loaded or about to be" if ahead else "loaded"
            raise NoRoom(
                f"{self._max_adapters} adapters are {are}, and '{adapter}' would be one more: "
                "unload or delete one, or start the server with a larger --max-adapters",
                param="adapter",
            )

    async def require_disk(self, adapter: str) -> None:
        """Ask before training whether its files will find room, as far as that can be known: a
        version is about as large as the largest one that the adapter has. Raises `DiskError`."""
        await asyncio.to_thread(require_writable, self._directory, self.path(adapter, 0).parent)

    def path(self, adapter: str, number: int) -> Path:
        """Where the files of a version stay."""
        return self._directory / "adapters" / adapter / str(number)

    async def staging_path(self, adapter: str, number: int) -> Path:
        """Where they are written first; its parent exists."""
        path = self.path(adapter, number)
        await asyncio.to_thread(make_directory, path.parent)
        return path.with_name(f"{number}.tmp")

    async def keep_files(self, adapter: str, number: int) -> Path:
        """Rename a staged directory to its final name, durably."""
        path = self.path(adapter, number)
        self._at("before rename")
        await asyncio.to_thread(move_durably, path.with_name(f"{number}.tmp"), path)
        self._at("after rename")
        return path

    async def publish(self, conclusion: Conclusion) -> VersionRecord:
        """Keep the files, commit the version and its samples, let the engine adopt it.

        Raises `NoRoom`; then nothing was done.
        """
        name = conclusion.record.adapter
        self.require_room(name)
        self._publishing.add(name)
        try:
            return await self._publish(conclusion)
        finally:
            self._publishing.discard(name)

    async def _publish(self, conclusion: Conclusion) -> VersionRecord:
        record = await self._keep(conclusion.record)
        self._at("before commit")
        record = await self._store.write(
            adapters.publish,
            record,
            consumed=conclusion.consumed,
            trained_on=conclusion.trained_on,
            event=conclusion.event,
        )
        self._at("after commit")
        await self.adopt(record)
        await self.forget(candidate_name(record.adapter))
        await self.trim(record.adapter)
        return record

    async def refuse(self, conclusion: Conclusion) -> VersionRecord:
        """Keep the files for whoever wants to look, commit the refusal and its samples."""
        record = await self._keep(conclusion.record)
        self._at("before commit")
        record = await self._store.write(
            adapters.refuse,
            record,
            consumed=conclusion.consumed,
            trained_on=conclusion.trained_on,
            event=conclusion.event,
            tries=conclusion.tries,
        )
        self._at("after commit")
        await self.forget(candidate_name(record.adapter))
        await self.trim(record.adapter)
        return record

    async def trim(self, adapter: str) -> None:
        """Remove versions and optimiser states that nobody needs any more; nothing else may work on
        the adapter meanwhile."""
        try:
            gone = await self._store.write(forget_versions, adapter, self._retention, time.time())
        except StoreError as error:  # later, then: no reason to fail what has succeeded
            logger.error("old versions cannot be forgotten", exc_info=error)
            gone = []
        for version in gone:
            await self.forget(reference_name(adapter, version.number))
            # No row names them any more: what fails here, recovery removes.
            await asyncio.to_thread(shutil.rmtree, version.path, ignore_errors=True)
        await trim_versions(self._store, adapter)

    async def hold(self, conclusion: Conclusion) -> VersionRecord:
        """Keep the files and a candidate's row; its samples stay assigned until the decision."""
        record = await self._keep(conclusion.record)
        self._at("before commit")
        record = await self._store.write(
            _save_candidate, record, conclusion.trained_on, conclusion.event
        )
        self._at("after commit")
        await self.forget(candidate_name(record.adapter))
        return record

    async def adopt(self, record: VersionRecord) -> AdapterVersion:
        """Make a committed version the one that answers; waits for the engine if need be. Raises
        `EngineDead` if the server ends first: the next start adopts it."""
        version = _adapter_version(record)
        self._at("before adopt")
        while True:
            try:
                adopted = await self._client.publish_adapter(version)
            except EngineDead:
                self._client.expect_adapter(version)
                await engine_ready(self._client, or_end=True)
                continue
            self._at("after adopt")
            return adopted

    async def catch_up(self, name: str) -> int | None:
        """Let the engine answer with what is committed, and remove directories that no version
        names; the number of what was adopted, if that was another version.

        For what failed between the commit and its adoption, or after a commit of which nobody
        knew. Nothing else may work on `name` meanwhile. Raises `NoRoom`.
        """
        known, current, published = await self._store.read(_committed, name)
        await asyncio.to_thread(remove_strays, self.path(name, 0).parent, known)
        answers = self._client.adapters.get(name)
        if current is None:
            own = self.path(name, 0).parent
            # Rolled back to the base, or deleted: what answers is loaded by hand, or a version.
            if answers is not None and (published or Path(answers.path).is_relative_to(own)):
                await self.withdraw(name)
                return 0
            return None
        if answers == _adapter_version(current):
            return None
        self.require_room(name)
        await self.adopt(current)
        await self.forget(candidate_name(name))
        return current.number

    async def behind(self) -> list[str]:
        """Adapters that answer with another version than is committed, as far as is known."""
        answering = self._client.adapters
        return [
            version.adapter
            for version in await self._store.read(current_versions)
            if answering.get(version.adapter) != _adapter_version(version)
        ]

    async def withdraw(self, name: str) -> None:
        """Let no version answer as `name` any more; waits for the engine as `adopt` does."""
        while True:
            try:
                await self._client.unload_adapter(name)
            except NotFound:
                return
            except EngineDead:
                await engine_ready(self._client, or_end=True)

    async def load_reference(self, record: VersionRecord, name: str = "") -> AdapterVersion:
        """A version that others are scored against, whatever its adapter's current one is.

        Under `name`, or that of all who learn from feedback (`forget_references`).
        """
        name = name or reference_name(record.adapter, record.number)
        loaded = self._client.adapters.get(name)
        if loaded is not None:
            return loaded
        return await self._client.publish_adapter(
            AdapterVersion(name, record.number, record.content_hash, record.path)
        )

    async def forget_references(self, adapter: str) -> None:
        """Take an adapter's references out of the engine."""
        beginning = reference_name(adapter, 0).removesuffix("0")
        for name in list(self._client.adapters):
            if name.startswith(beginning):
                await self.forget(name)

    async def forget(self, name: str) -> None:
        """Take a name out of the engine, if it is there and the engine is."""
        try:
            await self._client.unload_adapter(name)
        except (NotFound, EngineDead):
            logger.debug("%s was not loaded", name)

    async def _keep(self, record: VersionRecord) -> VersionRecord:
        path = await self.keep_files(record.adapter, record.number)
        return replace(record, path=str(path))


def _save_candidate(
    connection: Connection, record: VersionRecord, trained_on: Sequence[str], event: EventRecord
) -> VersionRecord:
    record = adapters.save_version(connection, record, trained_on)
    events.add(connection, event)
    return record


def _committed(connection: Connection, name: str) -> tuple[set[str], VersionRecord | None, bool]:
    """Directories of its versions, the one that is to answer, and whether one was published."""
    record, known = adapters.find(connection, name), adapters.versions(connection, name)
    number = 0 if record is None else record.current
    current = next((version for version in known if version.number == number), None)
    published = any(version.state is VersionState.PUBLISHED for version in known)
    return {version.path for version in known}, current, published


def current_versions(connection: Connection) -> list[VersionRecord]:
    """The versions that are to answer, one for each adapter that has one."""
    known = {(each.adapter, each.number): each for each in adapters.versions(connection)}
    wanted = [(record.name, record.current) for record in adapters.listed(connection)]
    return [known[key] for key in wanted if key in known]


def _adapter_version(record: VersionRecord) -> AdapterVersion:
    return AdapterVersion(record.adapter, record.number, record.content_hash, record.path)


async def engine_ready(client: ServingEngine, *, or_end: bool = False) -> None:
    """Wait until the engine takes requests again. With `or_end`, where nobody may cancel the wait,
    raises `EngineDead` once the server ends, as the engine may not come back then."""
    while client.state is not EngineState.READY:
        if or_end and client.state is EngineState.DRAINING:
            raise EngineDead("the server is stopping")
        await asyncio.sleep(_ENGINE_POLL_S)


def require_writable(directory: Path, versions: Path) -> None:
    """Raise `DiskError` unless `directory` takes what the largest of `versions` holds. Blocks."""
    if not os.access(directory, os.W_OK):
        raise DiskError(f"{directory} cannot be written to: is its disk mounted read-only?")
    needed = _LEAST_FREE_BYTES
    for version in versions.glob("*/"):
        with suppress(FileNotFoundError):  # it may be deleted meanwhile
            files = sum(file.stat().st_size for file in version.iterdir())
            needed = max(needed, files + _LEAST_FREE_BYTES)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DiskError(
            f"the disk of {directory} is full: {free / _MIB:.0f} MiB are free, and a version needs "
            f"{needed / _MIB:.0f}; delete what is not needed"
        )


def move_durably(source: Path, target: Path) -> None:
    """Rename a directory whose files were flushed, and flush the rename. Blocks."""
    flush_directory(source)
    source.rename(target)
    flush_directory(target.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory in two steps, so that what remains after a crash is visibly waste."""
    if path.exists():
        waste = path.with_name(f"{path.name}.tmp") if path.suffix != ".tmp" else path
        if waste != path:
            shutil.rmtree(waste, ignore_errors=True)
            path.rename(waste)
        shutil.rmtree(waste)
