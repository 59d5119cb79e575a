"""From a trained job to a version of its adapter: staged aside, measured, then concluded.

A new adapter comes into being here and is published whatever the gate measures; an adapter that
was there has its own gate. Knows one job. Invariant: a job makes one version, and nothing
interrupts the way from its number to the end of the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.core.errors import StoreError, TandemError
from tandem.core.learning import (
    AdapterRecord,
    EventRecord,
    GateMode,
    JobRecord,
    Sample,
    VersionRecord,
    VersionState,
)
from tandem.core.version import AdapterVersion
from tandem.services.answering.models import SEPARATOR
from tandem.services.jobs.tools import JobFailed, JobTools, departure
from tandem.services.learning.conclude import WORDS, Concluder
from tandem.services.learning.gate import Outcome, Verdict
from tandem.services.learning.publish import Conclusion, candidate_name, remove_tree
from tandem.services.learning.settings import resolve_settings
from tandem.services.tasks import uninterrupted
from tandem.store import Store, adapters


class Publication:
    """The end of one job, whose `trainer` is open at the last step; `run` once."""

    def __init__(
        self,
        job: JobRecord,
        trainer: str,
        tools: JobTools,
        finish: Callable[[JobRecord], Awaitable[None]],
        taught: Sequence[Sample],
    ) -> None:
        """`finish` lets the job succeed; `taught` is what it was trained on."""
        self._job = job
        self._concluder = Concluder(job.adapter, trainer, tools.course)
        self._tools = tools
        self._course = tools.course
        self._store = tools.course.store
        self._finish = finish
        self._taught = taught

    async def run(self) -> None:
        """Make the version, unless it was made before an interruption, and end the job.

        Raises `JobFailed` if nothing was learned, the gate refused it or the adapter is not what it
        was, and `NoRoom`; then nothing was done. A version that is committed ends the job, whether
        or not the engine takes it at once: the learner sees to that.
        """
        try:
            await self._run()
        except StoreError:
            raise
        except TandemError as error:
            made = await self._made()
            if made is None or made.state is not VersionState.PUBLISHED:
                raise
            told = f"{_label(made)} does not answer yet, and will by itself: {error}"
            await self._course.tell(self._job.job_id, "warning", told)
            await self._end(made)

    async def _run(self) -> None:
        name = self._job.adapter
        async with self._tools.learner.held(name):
            made = await self._made()
            if made is not None:
                await uninterrupted(self._go_on(made))
                return
            if not self._job.trained_tokens:
                raise JobFailed("no step could be trained; the events say why", "training_failed")
            await require_start(self._job, self._store)
            self._course.publisher.require_room(name)
            aside = await self._course.publisher.staging_path(name, 0)  # no version has number 0
            await asyncio.to_thread(remove_tree, aside)
            staged, verdict = await self._judged(aside)
            try:
                await uninterrupted(self._conclude(aside, staged, verdict))
            except BaseException:
                await self._course.publisher.forget(candidate_name(name))
                raise

    async def _made(self) -> VersionRecord | None:
        """The job's version, if it is in the store."""
        known = await self._store.read(adapters.versions, self._job.adapter)
        return next((each for each in known if each.origin == self._job.job_id), None)

    async def _judged(self, aside: Path) -> tuple[AdapterVersion, Verdict]:
        record = await self._store.read(adapters.find, self._job.adapter)
        own = {} if record is None else record.settings
        settings = resolve_settings(self._course.defaults, own)
        unused = record is None or not record.current
        if unused and not self._continues:
            settings = replace(settings, gate=GateMode.ALWAYS)
        return await self._concluder.examine(aside, settings, self._taught)

    @property
    def _continues(self) -> bool:
        """Whether the job was asked to go on with an adapter (that may be gone by now)."""
        return self._job.model.endswith(f"{SEPARATOR}{self._job.adapter}")

    async def _conclude(self, aside: Path, staged: AdapterVersion, verdict: Verdict) -> None:
        name, now_s = self._job.adapter, self._course.now()
        publisher = self._course.publisher
        if verdict.outcome is Outcome.PUBLISH:
            publisher.require_room(name)  # others may have come since
        number = await self._store.write(adapters.begin_version, AdapterRecord(name, now_s))
        record = await self._store.read(adapters.find, name)
        path = await publisher.staging_path(name, number)
        await asyncio.to_thread(aside.rename, path)
        version = VersionRecord(
            adapter=name,
            number=number,
            content_hash=staged.content_hash,
            path=str(publisher.path(name, number)),
            created_s=now_s,
            state=VersionState.CANDIDATE,
            parent=record.current if record is not None else 0,
            origin=self._job.job_id,
            metrics=verdict.metrics,
            reason="; ".join(verdict.reasons),
        )
        level, word = WORDS[verdict.outcome]
        why = f" ({version.reason})" if version.reason else ""
        message = f"{_label(version)} made by {self._job.job_id}: {word}{why}"
        conclusion = Conclusion(
            version, (), (), EventRecord(name, now_s, level, message, verdict.metrics)
        )
        version = await self._concluder.settle(conclusion, verdict.outcome)
        await self._end(version)

    async def _go_on(self, version: VersionRecord) -> None:
        """From a version that is in the store, and perhaps in the engine."""
        record = await self._store.read(adapters.find, version.adapter)
        if record is not None and record.current == version.number:
            await self._course.publisher.adopt(version)
            self._course.metrics.version.labels(version.adapter).set(version.number)
        await self._end(version)

    async def _end(self, version: VersionRecord) -> None:
        """End the job as its version ended."""
        self._tools.announce(version.adapter)
        if version.state is VersionState.REFUSED:
            raise JobFailed(
                f"the gate of '{version.adapter}' refused {_label(version)}: {version.reason}; its "
                "files are kept, and an administrator can publish it",
                "refused_by_gate",
            )
        published = version.state is VersionState.PUBLISHED
        told = f"Published {_label(version)}"
        if not published:
            told = f"{_label(version)} waits for a decision, as its adapter's gate is manual"
        canary = {"canary": dict(version.metrics)}
        await self._course.tell(self._job.job_id, "info", told, canary)
        await self._finish(self._job)


async def require_start(job: JobRecord, store: Store) -> None:
    """Raises `JobFailed` if the adapter answers with another version than the job began from."""
    problem = departure(job, await store.read(adapters.find, job.adapter))
    if problem is not None:
        raise JobFailed(problem, "adapter_changed", "model")


def _label(version: VersionRecord) -> str:
    return AdapterVersion(version.adapter, version.number, "", "").label
