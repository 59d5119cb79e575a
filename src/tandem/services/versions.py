"""Adapters that learn, and their versions: settings, publish, roll back, export, import, delete.

The rules are the store's (`store/adapters.py`); this joins them with the engine, the files and the
learner. Invariant: whatever changes which version answers also stops what was being learned from
the old one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from tandem.adapters.files import CONFIG_NAME, WEIGHTS_NAME, inspect_adapter
from tandem.core.errors import AdapterError, Conflict, NotFound
from tandem.core.learning import (
    AdapterRecord,
    EventRecord,
    GateMode,
    SampleState,
    Split,
    VersionRecord,
    VersionState,
)
from tandem.core.version import AdapterVersion
from tandem.services.adapters import Adapters, check_name
from tandem.services.learning.learner import Learner
from tandem.services.learning.publish import Conclusion, candidate_name, reference_name
from tandem.services.learning.settings import LearningSettings, resolve_settings
from tandem.services.learning.tools import LearningTools
from tandem.services.models import Models
from tandem.store import Connection, adapters, events, files, samples

_MOST_IMPORT_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An adapter as clients see it: what is kept of it, how it learns, its samples by state."""

    record: AdapterRecord
    settings: LearningSettings
    samples: Mapping[Split, Mapping[SampleState, int]]


class Versions:
    """The use cases around versions of adapters that the store knows."""

    def __init__(
        self, tools: LearningTools, learner: Learner, models: Models, loading: Adapters
    ) -> None:
        self._tools = tools
        self._store = tools.store
        self._client = tools.client
        self._publisher = tools.publisher
        self._learner = learner
        self._models = models
        self._loading = loading

    async def announce_all(self) -> None:
        """Make the kept adapters known as models; at the start."""
        for record in await self._store.read(adapters.listed):
            self._models.announce(record.name)

    async def listed(self) -> list[AdapterView]:
        """All adapters of the store, by name."""
        counted = await self._store.read(samples.counts)
        records = await self._store.read(adapters.listed)
        return [self._view(record, counted.get(record.name, {})) for record in records]

    async def find(self, name: str) -> AdapterView:
        """One of them. Raises `NotFound`."""
        record = await self._known(name)
        return self._view(record, (await self._store.read(samples.counts)).get(name, {}))

    async def create(self, name: str, settings: Mapping[str, Any]) -> AdapterView:
        """Make an adapter, or change the settings of the one there is.

        `settings` replace its own ones; empty ones make it follow the server's. They hold from the
        next version on; the shape of an adapter that has a version does not change any more.
        Raises `InvalidRequest`.
        """
        check_name(name)
        wanted = resolve_settings(self._tools.defaults, settings)
        known = await self._store.read(adapters.find, name)
        if known is not None and known.next_number > 1:
            before = resolve_settings(self._tools.defaults, known.settings)
            if before.lora != wanted.lora:
                raise Conflict(
                    f"'{name}' has versions: rank, alpha and targets stay as they are",
                    param="settings",
                )
        await self._store.write(_create, AdapterRecord(name, self._tools.now()), dict(settings))
        self._models.announce(name)
        await self._learner.discard(name)
        return await self.find(name)

    async def versions(self, name: str) -> list[VersionRecord]:
        """All versions, candidates and refused ones too, newest first. Raises `NotFound`."""
        await self._known(name)
        return (await self._store.read(adapters.versions, name))[::-1]

    async def events(self, name: str, before: int | None, limit: int) -> list[EventRecord]:
        """The history, newest first."""
        return await self._store.read(events.listed, name, before=before, limit=limit)

    async def publish(self, name: str, number: int) -> VersionRecord:
        """Let a version answer: approve a candidate, overrule a refusal, or pin a published one.

        Raises `NotFound`.
        """
        version = await self._version(name, number)
        if version.state is VersionState.PUBLISHED:
            return await self._pin(name, number, f"version {number} pinned")
        async with self._learner.held(name):
            used = await self._store.read(adapters.trained_on, name, number)
            event = self._event(name, f"version {number} published by request", number)
            version = await self._store.write(
                adapters.publish, version, consumed=used, trained_on=(), event=event
            )
            await self._publisher.adopt(version)
            self._tools.metrics.versions.labels(name, "published").inc()
            self._tools.metrics.version.labels(name).set(number)
        return version

    async def refuse(self, name: str, number: int) -> VersionRecord:
        """Give a candidate up that waits for a decision. Raises `NotFound`, `Conflict`."""
        version = await self._version(name, number)
        if version.state is not VersionState.CANDIDATE:
            raise Conflict(f"version {number} of '{name}' is {version.state.value} already")
        async with self._learner.held(name):
            used = await self._store.read(adapters.trained_on, name, number)
            event = self._event(name, f"version {number} refused by request", number)
            version = replace(version, reason=version.reason or "refused by request")
            version = await self._store.write(
                adapters.refuse, version, consumed=used, trained_on=(), event=event
            )
            self._tools.metrics.versions.labels(name, "refused").inc()
        return version

    async def roll_back(self, name: str, number: int | None) -> int:
        """Go back to a version (0: the base; None: what the current one was trained from).

        What was being trained is given up; learning goes on from that version. The number that
        answers now. Raises `NotFound`, `Conflict`.
        """
        record = await self._known(name)
        if number is None:
            current = await self._store.read(adapters.version, name, record.current)
            if current is None:
                raise Conflict(f"'{name}' has no version to roll back", param="version")
            number = current.parent
        await self._pin(name, number, f"rolled back from version {record.current} to {number}")
        self._tools.metrics.versions.labels(name, "rolled_back").inc()
        return number

    async def delete(self, name: str) -> None:
        """Forget an adapter with its versions and files. Raises `NotFound`."""
        await self._known(name)
        async with self._learner.held(name):
            await self._store.write(_delete, name)
            self._models.withdraw(name)
            references = reference_name(name, 0).removesuffix("0")
            for loaded in [name, *self._client.adapters]:
                if loaded == name or loaded.startswith(references):
                    await self._publisher.forget(loaded)
            # No row names them any more: what a crash leaves here, recovery removes.
            folder = self._publisher.path(name, 0).parent
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._tools.metrics.forget(name)

    async def archive(self, name: str, number: int | None) -> Path:
        """A zip of PEFT's files of a version (None: the current), to be removed by the caller.

        Raises `NotFound`.
        """
        record = await self._known(name)
        version = await self._version(name, record.current if number is None else number)
        return await asyncio.to_thread(_pack, Path(version.path))

    async def import_directory(self, name: str, path: str) -> VersionRecord:
        """Publish a PEFT directory below the allowed roots as the next version of `name`.

        Raises `InvalidRequest`, or `AdapterError` if the files do not fit the model.
        """
        check_name(name)
        source = await self._loading.directory(name, path)
        return await self._import(name, lambda target: _copy(source, target))

    async def import_archive(self, name: str, archive: Path) -> VersionRecord:
        """The same with an uploaded zip of a PEFT directory."""
        check_name(name)
        return await self._import(name, lambda target: _unpack(archive, target))

    async def uploaded(self, file_id: str, tenant: str) -> Path:
        """Where an uploaded file of this tenant lies. Raises `NotFound`."""
        file = await self._store.read(files.find, file_id)
        if file is None or file.tenant != tenant:
            raise NotFound(f"the file '{file_id[:64]}' does not exist", param="file_id")
        return Path(file.path)

    async def _import(self, name: str, fill: Callable[[Path], None]) -> VersionRecord:
        record = AdapterRecord(name, self._tools.now())
        await self._store.write(adapters.create, record)
        async with self._learner.held(name):
            number = await self._store.write(adapters.allocate, name)
            path = await self._publisher.staging_path(name, number)
            try:
                await asyncio.to_thread(fill, path)
                content_hash = (await asyncio.to_thread(inspect_adapter, path)).content_hash
                staged = await self._client.load_adapter(candidate_name(name), str(path))
                version = await self._examined(name, number, replace(staged, path=str(path)))
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
                raise
            event = self._event(name, f"version {number} imported", number)
            conclusion = Conclusion(replace(version, content_hash=content_hash), (), (), event)
            version = await self._publisher.publish(conclusion)
            self._models.announce(name)
            self._tools.metrics.version.labels(name).set(number)
        return version

    async def _examined(self, name: str, number: int, staged: AdapterVersion) -> VersionRecord:
        """An import is asked for by name, so it is measured and published."""
        record = await self._known(name)
        settings = resolve_settings(self._tools.defaults, record.settings)
        verdict = await self._tools.examiner.examine(
            name,
            staged,
            replace(settings, gate=GateMode.ALWAYS),
            (),
            self._tools.encoder(settings),
        )
        return VersionRecord(
            adapter=name,
            number=number,
            content_hash=staged.content_hash,
            path=str(self._publisher.path(name, number)),
            created_s=self._tools.now(),
            state=VersionState.CANDIDATE,
            origin="import",
            metrics=verdict.metrics,
            reason="; ".join(verdict.reasons),
        )

    async def _pin(self, name: str, number: int, message: str) -> VersionRecord:
        async with self._learner.held(name):
            event = self._event(name, message, number)
            version = await self._store.write(adapters.set_current, name, number, event)
            if version is not None:
                await self._publisher.adopt(version)
            else:
                await self._publisher.forget(name)
            self._tools.metrics.version.labels(name).set(number)
        base = VersionRecord(name, 0, "", "", 0.0, VersionState.PUBLISHED)
        return base if version is None else version

    async def _known(self, name: str) -> AdapterRecord:
        record = await self._store.read(adapters.find, name)
        if record is None:
            raise NotFound(f"there is no adapter '{name[:64]}' that learns", param="name")
        return record

    async def _version(self, name: str, number: int) -> VersionRecord:
        await self._known(name)
        version = await self._store.read(adapters.version, name, number)
        if version is None:
            raise NotFound(f"adapter '{name}' has no version {number}", param="version")
        return version

    def _view(
        self, record: AdapterRecord, counted: Mapping[Split, Mapping[SampleState, int]]
    ) -> AdapterView:
        return AdapterView(record, resolve_settings(self._tools.defaults, record.settings), counted)

    def _event(self, name: str, message: str, number: int) -> EventRecord:
        return EventRecord(name, self._tools.now(), "info", message, {"version": number})


def _create(connection: Connection, record: AdapterRecord, settings: dict[str, Any]) -> None:
    adapters.create(connection, record)
    adapters.set_settings(connection, record.name, settings)


def _delete(connection: Connection, name: str) -> None:
    adapters.delete(connection, name)
    events.forget(connection, name)


def _copy(source: Path, target: Path) -> None:
    inspect_adapter(source)
    target.mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        with (source / name).open("rb") as stream:
            _write(stream, target / name)


def _unpack(archive: Path, target: Path) -> None:
    """Take the two files out of a zip, wherever in it they lie; nothing else is read."""
    try:
        with zipfile.ZipFile(archive) as packed:
            members = {Path(info.filename).name: info for info in packed.infolist()}
            target.mkdir()
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                if name not in members:
                    raise AdapterError(f"the archive has no {name}", param="file_id")
                if members[name].file_size > _MOST_IMPORT_BYTES:
                    raise AdapterError(f"{name} in the archive is too large", param="file_id")
                with packed.open(members[name]) as stream:
                    _write(stream, target / name)
    except (zipfile.BadZipFile, OSError) as error:
        raise AdapterError(f"cannot read the archive: {error}", param="file_id") from error


def _write(stream: IO[bytes], target: Path) -> None:
    with target.open("wb") as file:
        shutil.copyfileobj(stream, file)
        file.flush()
        os.fsync(file.fileno())


def _pack(directory: Path) -> Path:
    with tempfile.NamedTemporaryFile(suffix=".zip", delete=False) as file:
        path = Path(file.name)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            packed.write(directory / name, name)
    return path
