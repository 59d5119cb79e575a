"""Fine-tuning jobs as clients see them: create, list, look up, cancel, pause, resume.

Runs a bounded number of jobs at once, oldest first, and goes on with them after a restart. Knows no
HTTP. Invariant: a job's status only moves as OpenAI's does, and only its owner sees it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.core.errors import Conflict, InvalidRequest, NotFound
from tandem.core.learning import (
    AdapterRecord,
    CheckpointRecord,
    EventRecord,
    FileRecord,
    JobRecord,
    JobStatus,
)
from tandem.services.jobs.method import read_method
from tandem.services.jobs.results import as_csv
from tandem.services.jobs.run import JobRun, JobTools
from tandem.services.learning.settings import resolve_settings
from tandem.services.models import Models
from tandem.store import Connection, adapters, events, files, jobs

logger = logging.getLogger(__name__)

PURPOSE = "fine-tune"
_RESULTS = "fine-tune-results"
_AT_ONCE = 2
_EVERY_EVENT = 1_000_000
_OPEN = (JobStatus.VALIDATING, JobStatus.QUEUED, JobStatus.RUNNING)


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


class Jobs:
    """The jobs of one server."""

    def __init__(self, tools: JobTools, models: Models) -> None:
        self._tools = tools
        self._store = tools.course.store
        self._models = models
        self._runs: dict[str, JobRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def start(self) -> None:
        """Go on with what was under way when the server ended."""
        for job in await self._store.read(jobs.in_status, _OPEN):
            await asyncio.to_thread(self._tidy, job, await self._kept(job))
            self._launch(job)

    async def stop(self) -> None:
        """Stop working; jobs go on at the next start from their last commits."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def create(self, ask: JobAsk, tenant: str) -> JobRecord:
        """Keep a job and put it into the queue. Raises `InvalidRequest`, `NotFound`."""
        model = self._models.find(ask.model)
        job_id = f"ftjob-{uuid.uuid4().hex[:24]}"
        adapter = model.name or _adapter_name(ask.suffix, job_id)
        record = await self._store.read(adapters.find, adapter)
        own = {} if record is None else record.settings
        settings = resolve_settings(self._tools.course.defaults, own)
        method, _ = read_method(ask.method, ask.hyperparameters, settings)
        for file_id, param in (
            (ask.training_file, "training_file"),
            (ask.validation_file, "validation_file"),
        ):
            if file_id:
                await self._check_file(file_id, tenant, param)
        job = JobRecord(
            job_id=job_id,
            created_s=self._tools.course.now(),
            tenant=tenant,
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
        await self._store.write(_add, job, AdapterRecord(adapter, job.created_s), told)
        self._launch(job)
        return job

    async def find(self, job_id: str, tenant: str) -> JobRecord:
        """A job of this tenant, as it is now. Raises `NotFound`."""
        job = await self._store.read(jobs.find, job_id)
        if job is None or job.tenant != tenant:
            raise NotFound(f"there is no fine-tuning job '{job_id[:64]}'", param="job_id")
        return job

    async def listed(self, tenant: str, after: str | None, limit: int) -> list[JobRecord]:
        """Newest first."""
        return await self._store.read(jobs.listed, tenant, after=after, limit=limit)

    async def events(
        self, job_id: str, tenant: str, before: int | None, limit: int
    ) -> list[EventRecord]:
        """History of a job, newest first."""
        await self.find(job_id, tenant)
        return await self._store.read(events.listed, job_id, before=before, limit=limit)

    async def checkpoints(
        self, job_id: str, tenant: str, after: str | None, limit: int
    ) -> list[CheckpointRecord]:
        """Checkpoints of a job (the ends of its epochs), newest first."""
        await self.find(job_id, tenant)
        return await self._store.read(jobs.checkpoints, job_id, after=after, limit=limit)

    async def cancel(self, job_id: str, tenant: str) -> JobRecord:
        """Give a job up; what it committed stays. Raises `NotFound`, `Conflict`."""
        job = await self.find(job_id, tenant)
        if job.status not in (*_OPEN, JobStatus.PAUSED):
            raise _wrong_status(job, "cancelled")
        await self._end(job_id)
        job = await self.find(job_id, tenant)
        if job.status in (*_OPEN, JobStatus.PAUSED):
            now_s = self._tools.course.now()
            job = replace(job, status=JobStatus.CANCELLED, finished_s=now_s)
            await self._change(job, "Job cancelled")
        return job

    async def pause(self, job_id: str, tenant: str) -> JobRecord:
        """Stop after the current step, which is committed. Raises `NotFound`, `Conflict`."""
        job = await self.find(job_id, tenant)
        if job.status not in _OPEN:
            raise _wrong_status(job, "paused")
        if job.status is JobStatus.RUNNING and job_id in self._runs:
            self._runs[job_id].pause()
            await asyncio.wait((self._tasks[job_id],))
            return await self.find(job_id, tenant)
        await self._end(job_id)
        job = replace(await self.find(job_id, tenant), status=JobStatus.PAUSED)
        await self._change(job, "Job paused")
        return job

    async def resume(self, job_id: str, tenant: str) -> JobRecord:
        """Go on with a paused job. Raises `NotFound`, `Conflict`."""
        job = await self.find(job_id, tenant)
        if job.status is not JobStatus.PAUSED:
            raise _wrong_status(job, "resumed")
        job = replace(job, status=JobStatus.QUEUED)
        await self._change(job, "Job resumed")
        self._launch(job)
        return job

    # ------------------------------------------------------------------ work

    def _launch(self, job: JobRecord) -> None:
        task = asyncio.create_task(self._work(job), name=job.job_id)
        self._tasks[job.job_id] = task
        task.add_done_callback(lambda ended: self._ended(job.job_id, ended))

    async def _work(self, job: JobRecord) -> None:
        async with self._slots:
            run = JobRun(job, self._tools, self._finish)
            self._runs[job.job_id] = run
            try:
                await run.run()
            except Exception as error:
                logger.error("%s failed", job.job_id, exc_info=error)
                await run.fail(
                    "internal error; the server's log has the details", "server_error", None
                )

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(job_id) is task:
            del self._tasks[job_id]
            self._runs.pop(job_id, None)
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s ended", job_id, exc_info=task.exception())

    async def _end(self, job_id: str) -> None:
        task = self._tasks.get(job_id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

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

    async def _change(self, job: JobRecord, message: str) -> None:
        told = EventRecord(job.job_id, self._tools.course.now(), "info", message)
        await self._store.write(_update, job, told)

    async def _check_file(self, file_id: str, tenant: str, param: str) -> None:
        file = await self._store.read(files.find, file_id)
        if file is None or file.tenant != tenant:
            raise InvalidRequest(f"the file '{file_id[:64]}' does not exist", param=param)
        if file.purpose != PURPOSE:
            raise InvalidRequest(
                f"'{file_id}' was uploaded for '{file.purpose}'; upload it with the purpose "
                f"'{PURPOSE}'",
                param=param,
            )

    async def _kept(self, job: JobRecord) -> set[str]:
        kept = await self._store.read(jobs.checkpoints, job.job_id)
        return {record.path for record in kept} | {job.checkpoint_path}

    def _tidy(self, job: JobRecord, kept: set[str]) -> None:
        """Remove directories that were written but never committed. Blocks."""
        folder = self._tools.directory / "jobs" / job.job_id
        for path in folder.iterdir() if folder.is_dir() else ():
            if str(path) not in kept:
                shutil.rmtree(path)


def _adapter_name(suffix: str, job_id: str) -> str:
    """A name for a new adapter: of letters, digits, '.', '_' and '-'."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", suffix).strip("-._")[:40]
    return f"{plain or 'ft'}-{job_id[-8:]}"


def _wrong_status(job: JobRecord, wanted: str) -> Conflict:
    return Conflict(f"the job is {job.status.value} and cannot be {wanted}", param="status")


def _add(connection: Connection, job: JobRecord, adapter: AdapterRecord, told: EventRecord) -> None:
    adapters.create(connection, adapter)
    jobs.add(connection, job)
    events.add(connection, told)


def _update(connection: Connection, job: JobRecord, told: EventRecord) -> None:
    jobs.update(connection, job)
    events.add(connection, told)


def _succeed(connection: Connection, job: JobRecord, file: FileRecord, told: EventRecord) -> None:
    files.add(connection, file)
    _update(connection, job, told)


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
