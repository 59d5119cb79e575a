"""What comes to an adapter from outside: directories that are loaded, files that become versions.

PEFT's files of any origin, below the allowed roots or uploaded; they are measured like any version.
Knows no HTTP. Invariant: what does not fit the model, or what the gate refuses, leaves nothing.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tandem.adapters.archives import copy, unpack
from tandem.adapters.files import inspect_adapter
from tandem.core.errors import AdapterError, Conflict, NotFound
from tandem.core.learning import (
    IMPORTED,
    AdapterRecord,
    EventRecord,
    GateMode,
    VersionRecord,
    VersionState,
)
from tandem.core.version import AdapterVersion
from tandem.services.answering.models import Models
from tandem.services.files import gone
from tandem.services.learning.gate import Outcome
from tandem.services.learning.learner import Learner
from tandem.services.learning.measure import Candidate
from tandem.services.learning.publish import Conclusion, candidate_name, remove_tree
from tandem.services.learning.settings import resolve_settings
from tandem.services.learning.tools import LearningTools
from tandem.services.tasks import uninterrupted
from tandem.services.versions.adapters import Adapters, check_name, without_path
from tandem.store import adapters, files


class Imports:
    """The use cases of files that were made elsewhere."""

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

    async def load(self, name: str, path: str | None = None) -> AdapterVersion:
        """As `Adapters.load`, for a name that does not learn. Raises `Conflict` if it does."""
        check_name(name)
        await self._require_unlearned(name)
        async with self._learner.settled(name):  # what it learns first would be replaced
            await self._require_unlearned(name)
            return await self._loading.load(name, path)

    async def directory(self, name: str, path: str) -> VersionRecord:
        """Publish a PEFT directory below the allowed roots as the next version of `name`.

        Raises `InvalidRequest`, or `AdapterError` if the files do not fit the model.
        """
        check_name(name)
        source = await self._loading.directory(name, path)

        def fill(target: Path) -> None:
            with without_path(source):
                copy(source, target)

        return await self._import(name, fill)

    async def archive(self, name: str, archive: Path, most_bytes: int) -> VersionRecord:
        """The same with an uploaded zip of a PEFT directory, of at most so many bytes."""
        check_name(name)
        return await self._import(name, lambda target: unpack(archive, target, most_bytes))

    async def uploaded(self, file_id: str, tenant: str) -> Path:
        """Where the bytes of an uploaded file of this tenant lie. Raises `NotFound`."""
        file = await self._store.read(files.find, file_id)
        if file is None or file.tenant != tenant:
            raise NotFound(f"the file '{file_id[:64]}' does not exist", param="file_id")
        if not await asyncio.to_thread(Path(file.path).is_file):
            raise gone(file)
        return Path(file.path)

    async def _require_unlearned(self, name: str) -> None:
        if await self._store.read(adapters.find, name) is not None:
            raise Conflict(f"'{name}' learns here; import the directory instead", param="name")

    async def _import(self, name: str, fill: Callable[[Path], None]) -> VersionRecord:
        async with self._learner.held(name):
            self._publisher.require_room(name)
            aside = await self._publisher.staging_path(name, 0)  # no version has number 0
            try:
                await asyncio.to_thread(remove_tree, aside)
                with without_path(aside):
                    await asyncio.to_thread(fill, aside)
                    content_hash = (await asyncio.to_thread(inspect_adapter, aside)).content_hash
                    staged = await uninterrupted(
                        self._client.load_adapter(candidate_name(name), str(aside))
                    )
                version = await self._examined(name, replace(staged, path=str(aside)))
                self._publisher.require_room(name)  # others may have come since
                record = AdapterRecord(name, self._tools.now())
                number = await self._store.write(adapters.begin_version, record)
                staging = await self._publisher.staging_path(name, number)
                await asyncio.to_thread(aside.rename, staging)
                path = str(self._publisher.path(name, number))
                version = replace(version, number=number, path=path, content_hash=content_hash)
                told = f"version {number} imported"
                event = EventRecord(name, self._tools.now(), "info", told, {"version": number})
                version = await self._publisher.publish(Conclusion(version, (), (), event))
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
                await self._publisher.forget(candidate_name(name))
                raise
            self._models.announce(name)
            self._tools.metrics.version.labels(name).set(number)
        return version

    async def _examined(self, name: str, staged: AdapterVersion) -> VersionRecord:
        """An import is asked for by name, so it is measured and published; it has no number yet."""
        record = await self._store.read(adapters.find, name)
        own = {} if record is None else record.settings
        settings = resolve_settings(self._tools.defaults, own)
        verdict = await self._tools.examiner.examine(
            Candidate(name, staged, ()),
            replace(settings, gate=GateMode.ALWAYS),
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
