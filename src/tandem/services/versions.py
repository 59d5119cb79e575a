"""Adapters that learn, and their versions: settings, publish, roll back, export, import, delete.

The rules are the store's (`store/adapters.py`); this joins them with the engine, the files and the
learner. Invariant: whatever changes which version answers also stops what was being learned from
the old one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.adapters.files import inspect_adapter
from tandem.core.errors import AdapterError, Conflict, InvalidRequest, NotFound
from tandem.core.learning import (
    IMPORTED,
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
from tandem.services.archives import copy, pack, unpack
from tandem.services.checkpoints import loaded_checkpoint
from tandem.services.learning.gate import Outcome
from tandem.services.learning.learner import Learner
from tandem.services.learning.publish import (
    Conclusion,
    candidate_name,
    reference_name,
    remove_tree,
)
from tandem.services.learning.settings import LearningSettings, check_new, resolve_settings
from tandem.services.learning.tools import LearningTools
from tandem.services.models import Models
from tandem.services.retention import trim_versions
from tandem.services.uninterrupted import uninterrupted
from tandem.store import Connection, adapters, events, files, jobs, samples


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
        check_new(wanted, self._client.info)
        known = await self._store.read(adapters.find, name)
        if known is not None and known.next_number > 1:
            before = resolve_settings(self._tools.defaults, known.settings)
            if before.lora != wanted.lora:
                raise Conflict(
                    f"'{name}' has versions: rank, alpha and targets stay as they are",
                    param="settings",
                )
        reference = wanted.reference_version
        if reference and not await self._store.read(adapters.version, name, reference):
            raise InvalidRequest(f"'{name}' has no version {reference}", param="reference")
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
        await self._version(name, number)
        async with self._learner.held(name):
            event = self._event(name, f"version {number} published by request", number)
            self._publisher.require_room(name)
            version, stored = await self._store.write(_publish, name, number, event)
            if stored is not None:
                self._tools.freshness.published(version, stored)
            await self._publisher.adopt(version)
            if stored is not None:
                self._tools.metrics.versions.labels(name, "published").inc()
            self._tools.metrics.version.labels(name).set(number)
            await trim_versions(self._store, name)
        return version

    async def refuse(self, name: str, number: int) -> VersionRecord:
        """Give a candidate up that waits for a decision. Raises `NotFound`, `Conflict`."""
        _require_candidate(await self._version(name, number))
        async with self._learner.held(name):
            event = self._event(name, f"version {number} refused by request", number)
            version = await self._store.write(_refuse, name, number, event)
            self._tools.metrics.versions.labels(name, "refused").inc()
            await trim_versions(self._store, name)
        return version

    async def delete_version(self, name: str, number: int) -> None:
        """Forget one version and its files; its number is not given again.

        Raises `NotFound`, or `Conflict` where it is needed: it answers, waits for a decision, or
        is the reference of the adapter's settings or of a job.
        """
        await self._version(name, number)
        async with self._learner.held(name):
            settings = (await self.find(name)).settings
            if settings.reference_version == number:
                raise Conflict(
                    f"version {number} is the reference of '{name}'; change its settings first",
                    param="version",
                )
            if users := await self._store.read(jobs.referring, name, number):
                raise Conflict(
                    f"version {number} is the reference of {users[0]}; cancel that job first",
                    param="version",
                )
            event = self._event(name, f"version {number} deleted", number)
            gone = await self._store.write(adapters.delete_version, name, number, event)
            await self._publisher.forget(reference_name(name, number))
            # No row names them any more: what a crash leaves here, recovery removes.
            await asyncio.to_thread(remove_tree, Path(gone.path))

    async def roll_back(self, name: str, number: int | None) -> int:
        """Go back to a version (0: the base; None: the parent of the current one).

        What was being trained is given up; learning goes on from that version. The number that
        answers now. Raises `NotFound`, `Conflict`.
        """
        if (await self._known(name)).current == 0 and number is None:
            raise _nothing_to_roll_back(name)
        async with self._learner.held(name):
            if number != 0:
                self._publisher.require_room(name)
            event = self._event(name, "rolled back", 0)
            reached, version = await self._store.write(_roll_back, name, number, event)
            if version is not None:
                await self._publisher.adopt(version)
            else:
                await self._publisher.withdraw(name)
            self._tools.metrics.version.labels(name).set(reached)
            self._tools.metrics.versions.labels(name, "rolled_back").inc()
        return reached

    async def delete(self, name: str) -> None:
        """Forget an adapter with its versions, its jobs' checkpoints and the files of both. Raises
        `NotFound`."""
        await self._known(name)
        async with self._learner.held(name):
            checkpoints = await self._store.write(_delete, name)
            self._models.withdraw(name)
            await self._publisher.withdraw(name)
            own = (reference_name(name, 0).removesuffix("0"), loaded_checkpoint(name))
            for loaded in [*self._client.adapters]:
                if loaded.startswith(own):
                    await self._publisher.forget(loaded)
            # No row names them any more: what a crash leaves of the versions, recovery removes.
            for folder in (self._publisher.path(name, 0).parent, *map(Path, checkpoints)):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        self._tools.metrics.forget(name)

    async def archive(self, name: str, number: int | None) -> Path:
        """A zip of PEFT's files of a version (None: the current), to be removed by the caller.

        Raises `NotFound`.
        """
        record = await self._known(name)
        version = await self._version(name, record.current if number is None else number)
        return await asyncio.to_thread(pack, Path(version.path))

    async def load(self, name: str, path: str | None = None) -> AdapterVersion:
        """As `Adapters.load`, for a name that does not learn. Raises `Conflict` if it does."""
        check_name(name)
        await self._require_unlearned(name)
        async with self._learner.settled(name):  # what it learns first would be replaced
            await self._require_unlearned(name)
            return await self._loading.load(name, path)

    async def _require_unlearned(self, name: str) -> None:
        if await self._store.read(adapters.find, name) is not None:
            raise Conflict(f"'{name}' learns here; import the directory instead", param="name")

    async def import_directory(self, name: str, path: str) -> VersionRecord:
        """Publish a PEFT directory below the allowed roots as the next version of `name`.

        Raises `InvalidRequest`, or `AdapterError` if the files do not fit the model.
        """
        check_name(name)
        source = await self._loading.directory(name, path)
        return await self._import(name, lambda target: copy(source, target))

    async def import_archive(self, name: str, archive: Path) -> VersionRecord:
        """The same with an uploaded zip of a PEFT directory."""
        check_name(name)
        return await self._import(name, lambda target: unpack(archive, target))

    async def uploaded(self, file_id: str, tenant: str) -> Path:
        """Where an uploaded file of this tenant lies. Raises `NotFound`."""
        file = await self._store.read(files.find, file_id)
        if file is None or file.tenant != tenant:
            raise NotFound(f"the file '{file_id[:64]}' does not exist", param="file_id")
        return Path(file.path)

    async def _import(self, name: str, fill: Callable[[Path], None]) -> VersionRecord:
        async with self._learner.held(name):
            self._publisher.require_room(name)
            aside = await self._publisher.staging_path(name, 0)  # no version has number 0
            try:
                await asyncio.to_thread(remove_tree, aside)
                await asyncio.to_thread(fill, aside)
                content_hash = (await asyncio.to_thread(inspect_adapter, aside)).content_hash
                staged = await uninterrupted(
                    self._client.load_adapter(candidate_name(name), str(aside))
                )
                version = await self._examined(name, replace(staged, path=str(aside)))
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
                await self._publisher.forget(candidate_name(name))
                raise
            record = AdapterRecord(name, self._tools.now())
            number = await self._store.write(adapters.begin_version, record)
            await asyncio.to_thread(aside.rename, await self._publisher.staging_path(name, number))
            version = replace(version, number=number, path=str(self._publisher.path(name, number)))
            event = self._event(name, f"version {number} imported", number)
            conclusion = Conclusion(replace(version, content_hash=content_hash), (), (), event)
            version = await self._publisher.publish(conclusion)
            self._models.announce(name)
            self._tools.metrics.version.labels(name).set(number)
        return version

    async def _examined(self, name: str, staged: AdapterVersion) -> VersionRecord:
        """An import is asked for by name, so it is measured and published; it has no number yet."""
        record = await self._store.read(adapters.find, name)
        own = {} if record is None else record.settings
        settings = resolve_settings(self._tools.defaults, own)
        verdict = await self._tools.examiner.examine(
            name,
            staged,
            replace(settings, gate=GateMode.ALWAYS),
            (),
            self._tools.encoder(settings),
        )
        if verdict.outcome is Outcome.REFUSE:
            raise AdapterError(f"'{name}' is not published: {'; '.join(verdict.reasons)}")
        return VersionRecord(
            adapter=name,
            number=0,
            content_hash=staged.content_hash,
            path=staged.path,
            created_s=self._tools.now(),
            state=VersionState.CANDIDATE,
            parent=0 if record is None else record.current,
            origin=IMPORTED,
            metrics=verdict.metrics,
            reason="; ".join(verdict.reasons),
        )

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


def _publish(
    connection: Connection, name: str, number: int, event: EventRecord
) -> tuple[VersionRecord, list[float] | None]:
    """Make a version current as it is now; it, and when the feedback was stored that it is the
    first to have learned from (None: it was published before)."""
    version = _stored(connection, name, number)
    if version.state is VersionState.PUBLISHED:
        pinned = replace(event, message=f"version {number} pinned")
        adapters.set_current(connection, name, number, pinned)
        return version, None
    used = adapters.trained_on(connection, name, number)
    version = adapters.publish(connection, version, consumed=used, event=event)
    learned = [each for each in samples.get(connection, used) if each.version == number]
    return version, [sample.created_s for sample in learned]


def _refuse(connection: Connection, name: str, number: int, event: EventRecord) -> VersionRecord:
    version = _stored(connection, name, number)
    _require_candidate(version)
    version = replace(version, reason=version.reason or "refused by request")
    used = adapters.trained_on(connection, name, number)
    return adapters.refuse(connection, version, consumed=used, event=event)


def _roll_back(
    connection: Connection, name: str, number: int | None, event: EventRecord
) -> tuple[int, VersionRecord | None]:
    """Where it went, and that version; None is the base."""
    record = adapters.find(connection, name)
    before = 0 if record is None else record.current
    if number is None:
        current = adapters.version(connection, name, before)
        if current is None:
            raise _nothing_to_roll_back(name)
        number = current.parent
    message = f"rolled back from version {before} to {number}"
    event = replace(event, message=message, data={"version": number})
    return number, adapters.set_current(connection, name, number, event)


def _stored(connection: Connection, name: str, number: int) -> VersionRecord:
    version = adapters.version(connection, name, number)
    if version is None:
        raise NotFound(f"adapter '{name}' has no version {number}", param="version")
    return version


def _require_candidate(version: VersionRecord) -> None:
    if version.state is not VersionState.CANDIDATE:
        raise Conflict(
            f"version {version.number} of '{version.adapter}' is {version.state.value} already"
        )


def _nothing_to_roll_back(name: str) -> Conflict:
    return Conflict(f"'{name}' has no version to roll back", param="version")


def _delete(connection: Connection, name: str) -> list[str]:
    """The directories of checkpoints that nobody needs then."""
    adapters.delete(connection, name)
    events.forget(connection, name)
    return jobs.forget_checkpoints(connection, name)
