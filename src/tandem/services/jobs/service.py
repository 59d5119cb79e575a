"""Fine-tuning jobs as clients see them: create, list, look up, cancel, pause, resume.

Goes on with them after a restart; `workers.py` does the work. Knows no HTTP. Invariant: a job's
status only moves as OpenAI's does, and only its owner sees it.
"""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tandem.core.errors import InvalidRequest, NotFound, StoreError, WrongStatus
from tandem.core.learning import (
    CheckpointRecord,
    EventRecord,
    FileRecord,
    JobRecord,
    JobStatus,
    SampleKind,
)
from tandem.services.answering.models import Models
from tandem.services.auth import Caller
from tandem.services.durable import flush_directory, make_directory
from tandem.services.feedback.quota import spend_samples
from tandem.services.jobs.data import parse_examples
from tandem.services.jobs.method import read_method, written_down
from tandem.services.jobs.results import as_csv
from tandem.services.jobs.tools import JobTools, departure
from tandem.services.jobs.workers import OPEN, Workers
from tandem.services.learning.settings import BASE, reference_number, resolve_settings
from tandem.services.tasks import uninterrupted
from tandem.services.versions.retention import trim_jobs
from tandem.store import Connection, adapters, events, files, jobs

PURPOSE = "fine-tune"
_RESULTS = "fine-tune-results"
_EVERY_EVENT = 1_000_000
_PAUSE_S = 2.0
"""How long a pause waits for the current step before it gives it up."""
_NO_TRAINING = "this server's scheduling policy never trains; start it with another --policy"


@dataclass(frozen=True, slots=True)
class JobAsk:
    """What a client asks for, already validated field by field."""

    model: str
    training_file: str
    validation_file: str = ""
    suffix: str = ""
    seed: int | None = None
    method: Mapping[str, Any] | None = None
    hyperparameters: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] | None = None


class _Made(WrongStatus):
    """The job's version is committed; only the job's end is left to be written."""


class Jobs:
    """The jobs of one server."""

    def __init__(self, tools: JobTools, models: Models) -> None:
        self._tools = tools
        self._store = tools.course.store
        self._models = models
        self._workers = Workers(tools, self._finish)
        self._counting = asyncio.Lock()
        self._steering: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def start(self) -> None:
        """Go on with what was under way when the server ended."""
        await trim_jobs(self._store)
        under_way = await self._store.read(jobs.in_status, OPEN)
        for job in sorted(under_way, key=_begun, reverse=True):  # feedback waits for these
            if self._tools.course.trains:
                self._workers.launch(job)
            else:
                await self._tools.course.tell(job.job_id, "warning", f"Job waits: {_NO_TRAINING}")

    async def stop(self) -> None:
        """Stop working; jobs go on at the next start from their last commits.

        A version that is just being published is finished first.
        """
        await self._workers.stop()

    async def create(self, ask: JobAsk, caller: Caller) -> JobRecord:
        """Keep a job and put it into the queue.

        Its samples count for the caller, whatever becomes of them. Raises `InvalidRequest`,
        `NotFound`, `Forbidden` and `QuotaExceeded`.
        """
        model = await self._models.resolve(ask.model, caller)
        if model.checkpoint:
            raise InvalidRequest(
                "a job begins at the base model or at what an adapter has learned, not at a "
                "checkpoint; send the name of one of those",
                param="model",
            )
        job_id = f"ftjob-{uuid.uuid4().hex[:24]}"
        adapter = model.name or _adapter_name(ask.suffix, job_id)
        caller.require_train(adapter)
        if not self._tools.course.trains:
            raise InvalidRequest(_NO_TRAINING)
        record = await self._store.read(adapters.find, adapter)
        own = {} if record is None else record.settings
        settings = resolve_settings(self._tools.course.defaults, own)
        method, meaning = read_method(ask.method, ask.hyperparameters, settings)
        method = written_down(method, settings)
        if meaning.kind is not SampleKind.SFT:
            chosen = meaning.reference or (BASE if record is None else settings.reference)
            await self._check_reference(adapter, chosen)
            method[method["type"]]["hyperparameters"]["reference"] = chosen
        training = await self._check_file(ask.training_file, caller.tenant, "training_file")
        if ask.validation_file:
            await self._check_file(ask.validation_file, caller.tenant, "validation_file")
        job = JobRecord(
            job_id=job_id,
            created_s=self._tools.course.now(),
            tenant=caller.tenant,
            model=ask.model,
            adapter=adapter,
            status=JobStatus.VALIDATING,
            method=method,
            training_file=ask.training_file,
            validation_file=ask.validation_file,
            suffix=ask.suffix,
            seed=uuid.uuid4().int % (1 << 31) if ask.seed is None else ask.seed,
            metadata=dict(ask.metadata or {}),
        )
        told = EventRecord(job_id, job.created_s, "info", f"Created fine-tuning job: {job_id}")
        async with self._counting:  # a whole file, in memory
            counting = asyncio.to_thread(_count, Path(training.path), meaning.kind)
            count = await uninterrupted(counting)
        try:
            await self._store.write(_add, job, caller, count, told)
        except StoreError:  # nobody knows whether it is kept; its worker will see
            self._workers.launch(job)
            raise
        self._workers.launch(job)
        return job

    async def find(self, job_id: str, tenant: str, param: str = "job_id") -> JobRecord:
        """A job of this tenant, as it is now. Raises `NotFound`."""
        job = await self._store.read(jobs.find, job_id)
        if job is None or job.tenant != tenant:
            raise NotFound(f"there is no fine-tuning job '{job_id[:64]}'", param=param)
        return job

    async def listed(self, tenant: str, after: str | None, limit: int) -> list[JobRecord]:
        """Newest first, those older than job `after`. Raises `NotFound`."""
        if after is not None:
            await self.find(after, tenant, "after")
        return await self._store.read(jobs.listed, tenant, after=after, limit=limit)

    async def events(
        self, job_id: str, tenant: str, before: int | None, limit: int
    ) -> list[EventRecord]:
        """History of a job, newest first, older than event `before`. Raises `NotFound`."""
        await self.find(job_id, tenant)
        if before is not None:
            last = await self._store.read(events.listed, job_id, before=before + 1, limit=1)
            if not last or last[0].number != before:
                raise NotFound(f"the job has no event {before}", param="after")
        return await self._store.read(events.listed, job_id, before=before, limit=limit)

    async def checkpoints(
        self, job_id: str, tenant: str, after: str | None, limit: int
    ) -> list[CheckpointRecord]:
        """Checkpoints of a job (the ends of its epochs), newest first. Raises `NotFound`."""
        await self.find(job_id, tenant)
        if after is not None:
            known = await self._store.read(jobs.checkpoints, job_id)
            if after not in {record.checkpoint_id for record in known}:
                raise NotFound(f"the job has no checkpoint '{after[:64]}'", param="after")
        return await self._store.read(jobs.checkpoints, job_id, after=after, limit=limit)

    async def cancel(self, job_id: str, tenant: str) -> JobRecord:
        """Give a job up; what it committed stays. Raises `NotFound`, and `WrongStatus`: also if
        its version is committed."""
        known = (*OPEN, JobStatus.PAUSED)
        await self.find(job_id, tenant)
        async with self._steered(job_id):
            job = _require(await self.find(job_id, tenant), known, "cancelled")
            now_s = self._tools.course.now()
            told = EventRecord(job_id, now_s, "info", "Job cancelled")
            job = await self._stopped(job, known, told, JobStatus.CANCELLED, now_s)
        await trim_jobs(self._store, job_id)
        return job

    async def pause(self, job_id: str, tenant: str) -> JobRecord:
        """Stop after the current step, which is committed; a step that takes longer than a moment
        is given up, and so is a commit that fails. Raises `NotFound`, `WrongStatus` as `cancel`."""
        await self.find(job_id, tenant)
        async with self._steered(job_id):
            job = _require(await self.find(job_id, tenant), OPEN, "paused")
            if job.status is JobStatus.RUNNING:
                await self._workers.pause(job_id, _PAUSE_S)
            told = EventRecord(job_id, self._tools.course.now(), "info", "Job paused")
            return await self._stopped(job, OPEN, told, JobStatus.PAUSED)

    async def resume(self, job_id: str, tenant: str) -> JobRecord:
        """Go on with a paused job; it goes before those of its adapter that have not begun.

        Raises `NotFound`, and `WrongStatus`: also if its adapter has gone on without it.
        """
        await self.find(job_id, tenant)
        if not self._tools.course.trains:
            raise InvalidRequest(_NO_TRAINING)
        async with self._steered(job_id):
            job = _require(await self.find(job_id, tenant), (JobStatus.PAUSED,), "resumed")
            await self._workers.ended(job_id)  # it has said that it is paused, and may still close
            async with self._tools.learner.held(job.adapter):  # feedback waits from here on
                await self._require_unchanged(job)
                told = EventRecord(job_id, self._tools.course.now(), "info", "Job resumed")
                status = JobStatus.QUEUED if job.total_steps else JobStatus.VALIDATING
                try:
                    job = await self._store.write(_resume, told, status)
                except StoreError:  # nobody knows whether it is paused; its worker will see
                    self._workers.launch(replace(job, status=status))
                    raise
            self._workers.launch(job)
            return job

    async def _require_unchanged(self, job: JobRecord) -> None:
        """Raises `WrongStatus` if another version would be lost by what this job has begun."""
        if not job.checkpoint_path:
            return
        problem = departure(job, await self._store.read(adapters.find, job.adapter))
        if problem is not None:
            raise WrongStatus(problem, param="model")

    # ------------------------------------------------------------------ work

    def _steered(self, job_id: str) -> asyncio.Lock:
        """Held while somebody changes what a job does."""
        return self._steering.setdefault(job_id, asyncio.Lock())

    async def _stopped(
        self,
        job: JobRecord,
        known: Sequence[JobStatus],
        told: EventRecord,
        status: JobStatus,
        finished_s: float | None = None,
    ) -> JobRecord:
        """End the work on `job` and write that down; where that cannot be, the work goes on."""
        await self._workers.end(job.job_id)
        try:
            return await self._store.write(_move, known, status.value, told, status, finished_s)
        except (StoreError, _Made):
            if job.status in OPEN and self._tools.course.trains:
                self._workers.launch(job)
            raise

    async def _finish(self, job: JobRecord) -> None:
        """Write the result file and let the job succeed, in one transaction."""
        history = await self._store.read(events.listed, job.job_id, limit=_EVERY_EVENT)
        content = as_csv(history)
        file_id = f"file-{uuid.uuid4().hex[:24]}"
        path = self._tools.directory / "files" / file_id
        await asyncio.to_thread(_write_file, path, content)
        now_s = self._tools.course.now()
        file = FileRecord(
            file_id, now_s, "step_metrics.csv", _RESULTS, len(content), str(path), job.tenant
        )
        job = replace(job, status=JobStatus.SUCCEEDED, finished_s=now_s, result_files=(file_id,))
        told = EventRecord(job.job_id, now_s, "info", "The job has successfully completed")
        await self._store.write(_succeed, job, file, told)

    async def _check_reference(self, adapter: str, reference: str) -> None:
        number = reference_number(reference)
        if number and not await self._store.read(adapters.version, adapter, number):
            raise InvalidRequest(
                f"'{adapter}' has no version {number} to refer to; 'base' is always there",
                param="reference",
            )

    async def _check_file(self, file_id: str, tenant: str, param: str) -> FileRecord:
        file = await self._store.read(files.find, file_id)
        if file is None or file.tenant != tenant:
            raise InvalidRequest(f"the file '{file_id[:64]}' does not exist", param=param)
        if file.purpose != PURPOSE:
            raise InvalidRequest(
                f"'{file_id}' was uploaded for '{file.purpose}'; upload it with the purpose "
                f"'{PURPOSE}'",
                param=param,
            )
        return file


def _adapter_name(suffix: str, job_id: str) -> str:
    """A name for a new adapter: of letters, digits, '.', '_' and '-'."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", suffix).strip("-._")[:40]
    return f"{plain or 'ft'}-{job_id[-8:]}"


def _count(path: Path, kind: SampleKind) -> int:
    """Samples of a training file; 0 if it cannot be read, which the job will say. Blocks."""
    try:
        return len(parse_examples(path.read_bytes(), kind, ""))
    except (OSError, InvalidRequest):
        return 0


def _begun(job: JobRecord) -> bool:
    return job.status is JobStatus.RUNNING or bool(job.checkpoint_path)


def _require(job: JobRecord, known: Sequence[JobStatus], wanted: str) -> JobRecord:
    if job.status not in known:
        raise WrongStatus(f"the job is {job.status.value} and cannot be {wanted}", param="status")
    return job


def _add(
    connection: Connection, job: JobRecord, caller: Caller, count: int, told: EventRecord
) -> None:
    spend_samples(connection, caller, job.adapter, count, job.created_s)
    jobs.add(connection, job)
    events.add(connection, told)


def _move(
    connection: Connection,
    known: Sequence[JobStatus],
    wanted: str,
    told: EventRecord,
    status: JobStatus,
    finished_s: float | None = None,
) -> JobRecord:
    """Change the job that `told` is about, if it is still in one of the `known` statuses, and has
    made no version if it is open."""
    job = jobs.find(connection, told.subject)
    assert job is not None  # jobs are never deleted
    if job.status is status:  # its worker has said so
        return job
    _require(job, known, wanted)
    known_versions = adapters.versions(connection, job.adapter)
    made = [version for version in known_versions if version.origin == job.job_id]
    if made and job.status in OPEN:
        raise _Made(
            f"the job has made version {made[0].number} of '{job.adapter}' and is about to end: it "
            f"cannot be {wanted}",
            param="status",
        )
    job = replace(job, status=status, finished_s=finished_s)
    jobs.update(connection, job)
    events.add(connection, told)
    return job


def _resume(connection: Connection, told: EventRecord, status: JobStatus) -> JobRecord:
    """One of two begins: this job again, or one of its adapter that has not begun (`run.py`)."""
    job = _move(connection, (JobStatus.PAUSED,), "resumed", told, status)
    for other in jobs.under_way(connection, job.adapter) if job.checkpoint_path else ():
        if other.job_id != job.job_id:
            raise WrongStatus(f"{other.job_id} trains '{job.adapter}' now", param="model")
    return job


def _succeed(connection: Connection, job: JobRecord, file: FileRecord, told: EventRecord) -> None:
    files.add(connection, file)
    jobs.update(connection, job)
    events.add(connection, told)


def _write_file(path: Path, content: bytes) -> None:
    make_directory(path.parent)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    flush_directory(path.parent)
