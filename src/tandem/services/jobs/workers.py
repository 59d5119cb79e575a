"""Works on jobs: their files at once, their training when it is their turn.

A bounded number of jobs trains at the same time, and one for each adapter, in the order in which
their files were found valid; one that has begun goes first. Knows no tenants. Invariant: a store or
a disk that fails for a while delays a job and does not end it, and delays nobody who pauses or
cancels one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from weakref import WeakValueDictionary

from tandem.core.errors import StoreError
from tandem.core.learning import JobRecord, JobStatus
from tandem.services.jobs.run import JobRun
from tandem.services.jobs.tools import JobTools
from tandem.services.tasks import Backoff
from tandem.services.versions.retention import trim_jobs
from tandem.store import jobs

logger = logging.getLogger(__name__)

OPEN = (JobStatus.VALIDATING, JobStatus.QUEUED, JobStatus.RUNNING)
"""Statuses of jobs that somebody works on."""
_AT_ONCE = 2
_COMMIT_S = 30.0
"""How long a pause waits for the commit after the last step."""
_INTERNAL = "internal error; the server's log has the details"


class _NeverKept(Exception):
    """The store does not have the job: whoever made it was told so."""


class Workers:
    """The tasks of one server's jobs. Whoever calls sees to it that a job is launched once."""

    def __init__(self, tools: JobTools, finish: Callable[[JobRecord], Awaitable[None]]) -> None:
        """`finish` lets a job succeed."""
        self._tools = tools
        self._store = tools.course.store
        self._finish = finish
        self._runs: dict[str, JobRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._reading = asyncio.Semaphore(_AT_ONCE)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def launch(self, job: JobRecord) -> None:
        """Begin, or go on where the last commit was."""
        task = asyncio.create_task(self._work(job), name=job.job_id)
        self._tasks[job.job_id] = task
        task.add_done_callback(lambda ended: self._ended(job.job_id, ended))

    async def stop(self) -> None:
        """Stop working; a version that is just being published is finished first."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def end(self, job_id: str) -> None:
        """Stop working on one job; a version that is just being published is waited for, and its
        job succeeds."""
        if job_id in self._tasks:
            task = self._tasks[job_id]
            task.cancel()
            await asyncio.wait((task,))

    async def ended(self, job_id: str) -> None:
        """Wait until nobody works on this job, which is not open any more."""
        if job_id in self._tasks:
            task = self._tasks[job_id]
            if job_id not in self._runs:  # it has nothing to close, and may wait for its turn
                task.cancel()
            await asyncio.wait((task,))

    async def pause(self, job_id: str, patience_s: float) -> None:
        """Stop training after the current step, which is given up if it takes longer than
        `patience_s`, and commit. Nothing is done where a job does not train just now.

        What came of it is for the caller to see: a commit that fails, or takes long, is not
        waited for.
        """
        if job_id not in self._runs:
            return
        run, task = self._runs[job_id], self._tasks[job_id]
        run.pausing = True
        await asyncio.wait((task,), timeout=patience_s)
        if not task.done():
            await run.give_up_steps()
            await asyncio.wait((task,), timeout=_COMMIT_S)

    async def _work(self, job: JobRecord) -> None:
        with suppress(_NeverKept):
            await self._work_on(job)

    async def _work_on(self, job: JobRecord) -> None:
        # An older Tandem queued jobs that were paused before they had been validated.
        if job.status is JobStatus.VALIDATING or not job.total_steps:
            async with self._reading:  # whole files, in memory
                job = await self._insist(job.job_id, JobRun.validate)
        if job.status in OPEN:
            await self._train(job)
        await trim_jobs(self._store, job.job_id)

    async def _train(self, job: JobRecord) -> None:
        """When it is its turn, and again if it is still queued then: another one went first."""
        while True:
            async with self._turn(job.adapter), AsyncExitStack() as slot:
                await slot.enter_async_context(self._slots)
                job = await self._insist(job.job_id, partial(self._run, slot.aclose))
            if job.status is not JobStatus.QUEUED:
                return

    def _turn(self, adapter: str) -> asyncio.Lock:
        """Held by the job that trains `adapter`: the next one begins with what it has learned."""
        return self._turns.setdefault(adapter, asyncio.Lock())

    async def _run(self, leave: Callable[[], Awaitable[None]], run: JobRun) -> None:
        self._runs[run.job.job_id] = run
        try:
            await run.run(leave)
        finally:
            del self._runs[run.job.job_id]

    async def _insist(self, job_id: str, work: Callable[[JobRun], Awaitable[None]]) -> JobRecord:  # noqa: C901
        """Do `work`, again and again while the store or the disk fails; the job after it.

        Whoever pauses it sees to the rest: it is not tried again then.
        """
        backoff, step, unknown, told = Backoff(), 0, False, ""
        run: JobRun | None = None
        while True:
            try:
                job = await self._store.read(jobs.find, job_id)
                if job is None and unknown:
                    raise _NeverKept
                if job is None:  # a commit that nobody acknowledged may still come
                    unknown = True
                    await backoff.wait()
                    continue
                if job.status not in OPEN:  # it was written, although that looked like a failure
                    return job
                if job.step > step:
                    backoff.reset()
                step = job.step
                run = JobRun(job, self._tools, self._finish)
                try:
                    await work(run)
                except (StoreError, OSError):
                    raise
                except Exception as error:
                    logger.error("%s failed", job_id, exc_info=error)
                    await run.fail(_INTERNAL, "server_error", None)
                return run.job
            except (StoreError, OSError) as error:
                if run is not None and run.pausing:
                    logger.error("%s is interrupted while it is paused", job_id, exc_info=error)
                    return run.job
                if str(error) != told:
                    logger.error("%s is interrupted and tried again: %s", job_id, error)
                told = str(error)
                await backoff.wait()

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(job_id) is task:
            del self._tasks[job_id]
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s ended", job_id, exc_info=task.exception())
