"""Checkpoints of fine-tuning jobs, which answer while somebody asks for them.

One is found by its name in the store, by the tenant of its job only, and its files are loaded under
a name that no adapter can have, as the exact version that the job wrote. A few stay loaded; the one
that nobody has asked for longest goes first. Knows no text. Invariant: no more than `PLACES` are
loaded, and none is taken out of the engine while it writes an answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tandem.core.errors import AdapterError, NotFound, Overloaded
from tandem.core.ports import ServingEngine
from tandem.core.version import INTERNAL, AdapterVersion
from tandem.services.tasks import uninterrupted
from tandem.store import Store, jobs

logger = logging.getLogger(__name__)

PLACES = 4
_LABEL = re.compile(r"([A-Za-z0-9._-]{1,64}):([0-9a-f]{8}):ckpt-step-([1-9][0-9]{0,11})")


def checkpoint_label(adapter: str, job_id: str, step: int) -> str:
    """Names a checkpoint among all of this server; the end of the job's id tells jobs on one
    adapter apart."""
    return f"{adapter}:{job_id[-8:]}:ckpt-step-{step}"


def labelled_adapter(label: str) -> str | None:
    """The adapter that the job of this checkpoint trains; None if no checkpoint is called so."""
    match = _LABEL.fullmatch(label)
    return None if match is None else match[1]


def loaded_checkpoint(adapter: str, checkpoint_id: str = "") -> str:
    """The engine's name of a checkpoint, or what the names of all of an adapter begin with."""
    return f"{INTERNAL}checkpoint-of/{adapter}/{checkpoint_id}"


class Checkpoints:
    """The checkpoints of all jobs; `find` one, then ask the engine for it inside `held`."""

    def __init__(self, client: ServingEngine, store: Store) -> None:
        self._client = client
        self._store = store
        self._answers: dict[str, int] = {}  # by the engine's name, the last one asked for last
        self._changing = asyncio.Lock()

    async def find(self, label: str, tenant: str) -> AdapterVersion | None:
        """The version to load for a checkpoint of a job of `tenant`; None if there is none (any
        more)."""
        match = _LABEL.fullmatch(label)
        if match is None:
            return None
        adapter, job, step = match.groups()
        record = await self._store.read(jobs.checkpoint_of, tenant, adapter, job, int(step))
        if record is None or not await asyncio.to_thread(Path(record.path).is_dir):
            return None
        name = loaded_checkpoint(adapter, record.checkpoint_id)
        return AdapterVersion(name, record.step, record.content_hash, record.path)

    @asynccontextmanager
    async def held(self, version: AdapterVersion) -> AsyncIterator[None]:
        """It is loaded inside.

        Raises `Overloaded` while all places answer, `NotFound` if its files are not what the job
        wrote, `EngineDead`.
        """
        name = version.name
        async with self._changing:
            if name not in self._client.adapters:
                # Whoever leaves meanwhile leaves a checkpoint that is loaded and may go.
                await uninterrupted(self._load(version))
            self._answers[name] = self._answers.pop(name, 0) + 1
        try:
            yield
        finally:
            self._answers[name] -= 1

    async def _load(self, version: AdapterVersion) -> None:
        while len(self._answers.keys() - {version.name}) >= PLACES:
            await self._make_room()
        try:
            await self._client.publish_adapter(version)
        except AdapterError as error:
            logger.warning("the checkpoint at %s cannot be loaded: %s", version.path, error)
            raise NotFound(
                "the files of this checkpoint are gone, have changed or do not fit the model; the "
                "server's log has the details",
                param="model",
                code="model_not_found",
            ) from error
        self._answers.setdefault(version.name, 0)

    async def _make_room(self) -> None:
        for name, answers in self._answers.items():
            if not answers:
                with suppress(NotFound):  # it went with its adapter, or with an engine
                    await self._client.unload_adapter(name)
                del self._answers[name]
                return
        raise Overloaded(
            f"{PLACES} checkpoints of fine-tuning jobs are answering, and no more are loaded at "
            "the same time; try again when an answer has ended"
        )
