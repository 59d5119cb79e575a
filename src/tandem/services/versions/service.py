"""Adapters that learn, and their versions: settings, publish, roll back, export, delete.

The rules are the store's (`store/adapters.py`); this joins them with the engine, the files and the
learner. Invariant: whatever changes which version answers also stops what was being learned from
the old one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.adapters.archives import EXPORTS, pack
from tandem.adapters.files import holds
from tandem.core.errors import Conflict, InvalidRequest, NotFound
from tandem.core.learning import AdapterRecord, EventRecord, SampleState, Split, VersionRecord
from tandem.services.answering.models import Models
from tandem.services.learning.learner import Learner
from tandem.services.learning.publish import reference_name, remove_tree
from tandem.services.learning.settings import LearningSettings, check_new, resolve_settings
from tandem.services.learning.tools import LearningTools
from tandem.services.versions import changes
from tandem.services.versions.adapters import Adapters, check_name
from tandem.services.versions.checkpoints import loaded_checkpoint
from tandem.services.versions.imports import Imports
from tandem.store import adapters, batches, events, jobs, samples


@dataclass(frozen=True, slots=True)
class AdapterView:
    """An adapter as clients see it: what is kept of it, how it learns, its samples by state."""

    record: AdapterRecord
    settings: LearningSettings
    samples: Mapping[Split, Mapping[SampleState, int]]


class Versions:
    """The use cases around versions of adapters that the store knows; `imports` makes some of files
    from elsewhere."""

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
        self.imports = Imports(tools, learner, models, loading)

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
        await self._require_shape(name, wanted)
        reference = wanted.reference_version
        if reference and not await self._store.read(adapters.version, name, reference):
            raise InvalidRequest(f"'{name}' has no version {reference}", param="reference")
        record = AdapterRecord(name, self._tools.now())
        async with self._learner.held(name):
            await self._require_shape(name, wanted)  # the first version may have come meanwhile
            await self._store.write(changes.create, record, dict(settings))
        self._models.announce(name)
        await self._learner.discard(name)
        return await self.find(name)

    async def _require_shape(self, name: str, wanted: LearningSettings) -> None:
        """Raises `Conflict` if the adapter has versions of another shape."""
        known = await self._store.read(adapters.find, name)
        made = await self._store.read(adapters.versions, name)
        if known is not None and made:
            before = resolve_settings(self._tools.defaults, known.settings)
            if before.lora != wanted.lora:
                raise Conflict(
                    f"'{name}' has versions: rank, alpha and targets stay as they are",
                    param="settings",
                )

    async def versions(self, name: str) -> list[VersionRecord]:
        """All versions, candidates and refused ones too, newest first. Raises `NotFound`."""
        await self._known(name)
        return (await self._store.read(adapters.versions, name))[::-1]

    async def events(self, name: str, before: int | None, limit: int) -> list[EventRecord]:
        """The history, newest first."""
        return await self._store.read(events.listed, name, before=before, limit=limit)

    async def publish(self, name: str, number: int) -> VersionRecord:
        """Let a version answer: approve a candidate, overrule a refusal, or pin a published one.

        Raises `NotFound`, also when its files are gone or have changed.
        """
        await self._version(name, number)
        async with self._learner.held(name):
            event = self._event(name, f"version {number} published by request", number)
            self._publisher.require_room(name)
            await asyncio.to_thread(_require_files, await self._version(name, number))
            version, stored = await self._store.write(changes.publish, name, number, event)
            if stored is not None:
                self._tools.freshness.published(version, stored)
            await self._publisher.adopt(version)
            if stored is not None:
                self._tools.metrics.versions.labels(name, "published").inc()
            self._tools.metrics.version.labels(name).set(number)
            await self._publisher.trim(name)
        return version

    async def refuse(self, name: str, number: int) -> VersionRecord:
        """Give a candidate up that waits for a decision. Raises `NotFound`, `Conflict`."""
        changes.require_candidate(await self._version(name, number))
        async with self._learner.held(name):
            event = self._event(name, f"version {number} refused by request", number)
            version = await self._store.write(changes.refuse, name, number, event)
            self._tools.metrics.versions.labels(name, "refused").inc()
            await self._publisher.trim(name)
        return version

    async def delete_version(self, name: str, number: int) -> None:
        """Forget one version and its files; its number is not given again.

        Raises `NotFound`, or `Conflict` where it is needed: it answers, waits for a decision, or
        is the reference of the adapter's settings or of a job, or answers a batch.
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
            if batch := (await self._store.read(batches.pinned, name)).get(number):
                raise Conflict(
                    f"version {number} answers {batch}; cancel that batch first, or wait for its "
                    "end",
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
        answers now. Raises `Conflict`, and `NotFound`: also when the version's files are gone or
        have changed.
        """
        seen = (await self._known(name)).current
        if seen == 0 and number is None:
            raise changes.nothing_to_roll_back(name)
        async with self._learner.held(name):
            if number is None:
                number = await self._store.read(changes.parent, name, seen)
            if number != 0:
                self._publisher.require_room(name)
                await asyncio.to_thread(_require_files, await self._version(name, number))
            event = self._event(name, "rolled back", 0)
            reached, version = await self._store.write(changes.roll_back, name, number, event)
            await self._tools.rolled_back(name, reached, version)
        return reached

    async def delete(self, name: str) -> None:
        """Forget an adapter with its versions, its jobs' checkpoints and the files of both.

        Of a name that does not learn, what is loaded (whose files stay) and checkpoints of jobs
        that have made no version. Jobs go on that began from no version of it. Raises `NotFound`,
        and `Conflict` while a batch is answered by it.
        """
        check_name(name)
        await self._require_no_batch(name)
        if await self._store.read(adapters.find, name) is None:
            async with self._learner.settled(name):  # else it may begin to learn meanwhile
                if await self._store.read(adapters.find, name) is None:
                    await self._delete_unlearned(name)
                    return
        async with self._learner.held(name):
            await self._require_no_batch(name)  # one may have begun meanwhile
            checkpoints = await self._store.write(changes.delete, name)
            self._models.withdraw(name)
            await self._publisher.withdraw(name)
            await self._remove(name, [self._publisher.path(name, 0).parent, *checkpoints])
        self._tools.metrics.forget(name)

    async def _require_no_batch(self, name: str) -> None:
        if batch := await self._store.read(batches.answered_by, name):
            raise Conflict(
                f"'{name}' answers {batch}; cancel that batch first, or wait for its end",
                param="name",
            )

    async def archive(self, name: str, number: int | None) -> Path:
        """A zip of PEFT's files of a version (None: the current), to be removed by the caller.

        Raises `NotFound`, also when its files are gone.
        """
        record = await self._known(name)
        version = await self._version(name, record.current if number is None else number)
        folder = self._store.directory / EXPORTS
        return await asyncio.to_thread(pack, Path(version.path), folder)

    async def _delete_unlearned(self, name: str) -> None:
        loaded = name in self._client.adapters
        if loaded:
            await self._loading.unload(name)
        checkpoints = await self._store.write(jobs.forget_checkpoints, name)
        if not (loaded or checkpoints):
            await self._loading.unload(name)  # which says what is loaded
        await self._remove(name, checkpoints)

    async def _remove(self, name: str, folders: Iterable[str | Path]) -> None:
        """Take what else is loaded of an adapter out of the engine, and remove `folders`; no row
        names them any more, and what a crash leaves of them, the next start removes."""
        own = (reference_name(name, 0).removesuffix("0"), loaded_checkpoint(name))
        for loaded in [*self._client.adapters]:
            if loaded.startswith(own):
                await self._publisher.forget(loaded)
        for folder in folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

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


def _require_files(version: VersionRecord) -> None:
    """Before a version is committed as the one that answers: the engine could not load it later.

    Raises `NotFound` if its files are not what its row says. Blocks.
    """
    if not holds(version.path, version.content_hash):
        raise NotFound(
            f"the files of version {version.number} are gone or have changed",
            param="version",
            code="file_gone",
        )
