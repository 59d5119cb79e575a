"""One fine-tuning job from its files to its version, committed every few steps.

A commit is a directory (adapter and optimiser state) and then the job's row; after a crash the job
goes on from the last one. Knows one job. Invariant: `job.step` updates are in `checkpoint_path`
until the job has ended.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.core.errors import EngineDead, InvalidRequest, NoMemory, TandemError, TrainingCancelled
from tandem.core.learning import CheckpointRecord, EventRecord, JobRecord, JobStatus
from tandem.core.plan import NO_MEMORY
from tandem.core.version import INTERNAL
from tandem.services.answering.models import SEPARATOR
from tandem.services.jobs.deaths import SHORTAGES, Deaths, going_on
from tandem.services.jobs.examples import (
    Examples,
    admit,
    read_examples,
    reference_name,
    reference_of,
    require_steps,
    trainer_spec,
)
from tandem.services.jobs.method import Method
from tandem.services.jobs.publication import Publication, require_start
from tandem.services.jobs.results import step_event
from tandem.services.jobs.tools import JobFailed, JobTools
from tandem.services.jobs.validation import Validation
from tandem.services.learning.loaded import loaded_by_hand
from tandem.services.learning.publish import NoRoom, engine_ready, move_durably, remove_tree
from tandem.services.learning.references import NotFinite
from tandem.services.learning.steps import Failed, StepMaker, Wanted, run_steps
from tandem.services.learning.strays import make_room, remove_staged
from tandem.services.tasks import Backoff
from tandem.services.versions.retention import drop_optimisers
from tandem.store import Connection, adapters, events, jobs

logger = logging.getLogger(__name__)

COMMIT_STEPS = 10
_MOST_FAILURES = 5
_LOOK_FOR_ROOM_S = 2.0


class _Paused(Exception):
    """Somebody asked to pause, and everything is committed."""


class JobRun:
    """The work of one job; `validate` or `run` once. `pausing` may be set meanwhile."""

    def __init__(
        self,
        job: JobRecord,
        tools: JobTools,
        finish: Callable[[JobRecord], Awaitable[None]],
    ) -> None:
        """`finish` lets a job succeed once its version is published."""
        self.job = job
        self._finish = finish
        self._tools = tools
        self._course = tools.course
        self._store = tools.course.store
        self._client = tools.course.client
        self.pausing = False
        """Whether it shall commit after the current step and stop."""
        self._deaths, self._backoff = Deaths(self._client), Backoff()
        self._failures, self._told = 0, ""  # of steps in a row; for what memory it waits

    @property
    def trainer(self) -> str:
        """The trainer's name in the engine."""
        return f"job/{self.job.job_id}"

    @property
    def directory(self) -> Path:
        """Where its checkpoints are."""
        return self._tools.directory / "jobs" / self.job.job_id

    async def give_up_steps(self) -> None:
        """After `pause`: stop steps that the engine has, as they may never come to their turn."""
        try:
            await self._client.cancel_steps(self.trainer)
        except EngineDead:
            logger.debug("the engine is gone, and the steps with it")

    async def validate(self) -> None:
        """Read the files; the job is then queued, or has failed. Raises `StoreError`, `OSError`."""
        async with self._judged():
            self._course.publisher.require_room(self.job.adapter)
            await self._tell("info", f"Validating training file: {self.job.training_file}")
            if self.job.validation_file:
                told = f"Validating validation file: {self.job.validation_file}"
                await self._tell("info", told)
            examples = await read_examples(self.job, self._course)
            await engine_ready(self._client)
            base = self._course.references.base
            await admit(self.job, self.trainer, examples, base, self._course)
            require_steps(examples)
            told = "Files validated, moving job to queued state"
            await self._move(told, status=JobStatus.QUEUED, total_steps=examples.total_steps)

    async def run(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Work until the job succeeded, failed or is paused; one that is still queued then has let
        another one go first. `leave` gives up its place among those that train, and may be called
        again. Raises `StoreError`, `OSError`."""
        try:
            async with self._judged():
                if not await self._begin():
                    return
                examples = await read_examples(self.job, self._course)
                while True:
                    try:
                        await self._train(examples)
                        made = Publication(
                            self.job, self.trainer, self._tools, self._finish, examples.training
                        )
                        await made.run()
                        break
                    except NoRoom as error:
                        await leave()  # all its steps are done
                        await self._wait_for_room(error)
                    except SHORTAGES as error:  # of steps, scores, the gate's answers, copies
                        await self._wait_for_memory(error)
                        await self._backoff.wait()  # steps since the last commit are done again
                    except TandemError as error:
                        told = going_on(error)
                        if self.pausing:
                            raise _Paused from error
                        await self._tell("warning", told)
                        await self._deaths.outlive(error, self.job.step)
        except _Paused:
            await self._move("Job paused", status=JobStatus.PAUSED)
        finally:
            await self._close()

    @asynccontextmanager
    async def _judged(self) -> AsyncIterator[None]:
        """What is the job's own fault ends it."""
        try:
            yield
        except JobFailed as error:
            await self.fail(str(error), error.code, error.param)
        except InvalidRequest as error:
            await self.fail(str(error), error.code or "training_failed", error.param)

    async def _begin(self) -> bool:
        """From here on, feedback about the adapter waits; what it was learning is given up.

        False, and nothing is begun, if another job of the adapter has begun: that one would find
        the adapter changed.
        """
        name = self.job.adapter
        if not self.job.checkpoint_path:
            await engine_ready(self._client)
            self._course.publisher.require_room(name)
            if await loaded_by_hand(self._course, name):
                await self._tools.learner.keep_loaded(name)
        if self.job.status is not JobStatus.RUNNING:
            job = replace(self.job, status=JobStatus.RUNNING)
            now_s = self._course.now()
            told = EventRecord(job.job_id, now_s, "info", "Fine-tuning job started")
            if not await self._store.write(_start, job, told):
                return False
            self.job = job
        async with self._tools.learner.held(name):
            record = await self._store.read(adapters.find, name)
            if record is None and self.job.model.endswith(f"{SEPARATOR}{name}"):
                raise JobFailed(f"the adapter '{name}' is gone", "adapter_gone", "model")
            if record is not None:
                message = f"trained by {self.job.job_id}; feedback waits for its end"
                await self._course.tell(name, "info", message)
            if not self.job.checkpoint_path:
                current = 0 if record is None else record.current
                job = replace(self.job, start_version=current)
                await self._store.write(jobs.update, job)
                self.job = job
        return True

    async def _wait_for_room(self, error: NoRoom) -> None:
        """Rather than to lose what was learned; the trainer's memory is free meanwhile."""
        await self._tell("warning", f"The version waits: {error}")
        await self._close()
        while True:
            if self.pausing:
                raise _Paused
            try:
                self._course.publisher.require_room(self.job.adapter)
                return
            except NoRoom:
                await asyncio.sleep(_LOOK_FOR_ROOM_S)

    async def fail(self, message: str, code: str, param: str | None) -> None:
        """End the job with an error."""
        error = {"code": code, "message": message, "param": param}
        now_s = self._course.now()
        await self._move(message, "error", status=JobStatus.FAILED, error=error, finished_s=now_s)

    # ------------------------------------------------------------------ training

    async def _train(self, examples: Examples) -> None:
        """From the last commit to the last step."""
        await self._course.publisher.require_disk(self.job.adapter)
        method = examples.method
        reference = await reference_of(self.job, method, self._course)
        maker = await admit(self.job, self.trainer, examples, reference, self._course)
        await self._open(method)
        validation = Validation(self._client, maker, examples.held, method.loss)
        steps = examples.epoch_steps
        while self.job.step < examples.total_steps:
            epoch = self.job.step // steps
            plans = await asyncio.to_thread(examples.epoch, self.job.seed, epoch)
            while (start := self.job.step - epoch * steps) < steps:
                await require_start(self.job, self._store)
                end = min(start + COMMIT_STEPS, steps)
                await self._segment(plans[start:end], maker, method, validation, end == steps)

    async def _open(self, method: Method) -> None:
        """Open the trainer as soon as there is memory for it."""
        spec = await trainer_spec(self.job, self.trainer, method, self._course)
        while True:
            try:
                await self._client.open_trainer(spec)
                return
            except NoMemory as error:
                await self._wait_for_memory(error)

    async def _wait_for_memory(self, error: TandemError) -> None:
        if str(error) != self._told:
            await self._tell("info", f"The job waits: {error}")
        self._told = str(error)
        if self.pausing:
            raise _Paused
        await self._tools.learner.make_room()
        await asyncio.sleep(_LOOK_FOR_ROOM_S)

    async def _segment(
        self,
        plans: Sequence[Sequence[str]],
        maker: StepMaker,
        method: Method,
        validation: Validation,
        epoch_ends: bool,
    ) -> None:
        """Some steps and the commit after them. A pause cuts the segment short."""
        numbers: dict[str, Any] = {}
        done = tokens = 0
        first = self.job.step
        wanted: list[Wanted] = [
            (f"step-{uuid.uuid4().hex}", ids, method.loss, 0.0) for ids in plans
        ]
        results = run_steps(self._client, maker, wanted, more=lambda: not self.pausing)
        try:
            async with aclosing(results):
                async for result in results:
                    done += 1
                    if isinstance(result, Failed):
                        await self._left_out(first + done, result)
                        continue
                    prepared, outcome = result
                    self._failures = 0
                    tokens += prepared.step.num_tokens
                    numbers = {
                        "step": first + done,
                        "train_loss": outcome.loss,
                        "train_accuracy": prepared.accuracy(outcome),
                    }
                    if epoch_ends and done == len(plans) and validation.samples:
                        numbers |= await self._measured(validation)
                    await self._report(numbers)
        except TrainingCancelled:
            if not self.pausing:
                raise
        epoch_ends = epoch_ends and done == len(plans)
        if done:
            await self._commit(first + done, tokens, numbers if epoch_ends else None)
            self._backoff.reset()
        if self.pausing and self.job.step < self.job.total_steps:
            raise _Paused

    async def _measured(self, validation: Validation) -> dict[str, float]:
        """Nothing where the loss is not a number: that is said, and training goes on."""
        try:
            return await validation.measure()
        except NotFinite as error:
            await self._tell("warning", f"The validation loss is not known: {error}")
            return {}

    async def _report(self, numbers: dict[str, Any]) -> None:
        now_s = self._course.now()
        event = step_event(self.job.job_id, now_s, self.job.total_steps, numbers)
        await self._store.write(events.add, event)
        self._tools.at("job step")

    async def _left_out(self, step: int, failed: Failed) -> None:
        if failed.problem == NO_MEMORY:  # not the job's fault: it goes on from its last commit
            raise NoMemory(NO_MEMORY)
        self._failures += 1
        await self._tell("warning", f"Step {step} was left out: {failed.problem}")
        if self._failures >= _MOST_FAILURES:
            raise JobFailed(
                f"{self._failures} steps in a row failed, the last one because: {failed.problem}",
                "training_failed",
            )

    # ------------------------------------------------------------------ commits

    async def _commit(self, step: int, tokens: int, epoch: dict[str, Any] | None) -> None:
        """Write the trainer's state aside, rename it, and let the job's row name it."""
        path = self.directory / str(step)
        aside = path.with_name(f"{step}.tmp")
        await asyncio.to_thread(make_room, path, aside)
        name = f"{INTERNAL}checkpoint/{self.job.job_id}"
        try:
            staged = await self._client.stage(self.trainer, name, str(aside))
        except EngineDead:
            await asyncio.to_thread(remove_staged, aside)
            raise
        await self._course.publisher.forget(name)
        self._tools.at("job before rename")
        await asyncio.to_thread(move_durably, aside, path)
        self._tools.at("job after rename")
        checkpoint = None
        if epoch is not None:
            checkpoint = CheckpointRecord(
                checkpoint_id=f"ftckpt_{uuid.uuid4().hex[:24]}",
                job_id=self.job.job_id,
                created_s=self._course.now(),
                step=step,
                path=str(path),
                content_hash=staged.content_hash,
                metrics=epoch,
            )
        before = self.job.checkpoint_path
        job = replace(
            self.job,
            step=step,
            checkpoint_path=str(path),
            trained_tokens=self.job.trained_tokens + tokens,
        )
        await self._store.write(_commit, job, checkpoint)
        self.job = job
        self._tools.at("job after commit")
        kept = await self._store.read(jobs.checkpoints, job.job_id)
        if before in {record.path for record in kept}:  # the job goes on from the newest only
            await asyncio.to_thread(drop_optimisers, [before])
        elif before:
            await asyncio.to_thread(remove_tree, Path(before))

    async def _close(self) -> None:
        if (reference := reference_name(self.job)) in self._client.adapters:
            await self._course.publisher.forget(reference)
        try:
            await self._client.close_trainer(self.trainer)
        except EngineDead:
            logger.debug("the engine is gone, and the trainer with it")

    async def _move(self, told: str, level: str = "info", **changes: Any) -> None:
        """Change the job and say so."""
        job = replace(self.job, **changes)
        event = EventRecord(job.job_id, self._course.now(), level, told)
        await self._store.write(_move, job, event)
        self.job = job

    async def _tell(self, level: str, message: str) -> None:
        await self._course.tell(self.job.job_id, level, message)


def _commit(connection: Connection, job: JobRecord, checkpoint: CheckpointRecord | None) -> None:
    jobs.update(connection, job)
    if checkpoint is not None:
        jobs.add_checkpoint(connection, checkpoint)


def _start(connection: Connection, job: JobRecord, told: EventRecord) -> bool:
    """False if another job of its adapter has begun, and this one has not."""
    others = {other.job_id for other in jobs.under_way(connection, job.adapter)} - {job.job_id}
    if others and not job.checkpoint_path:
        return False
    _move(connection, job, told)
    return True


def _move(connection: Connection, job: JobRecord, told: EventRecord) -> None:
    jobs.update(connection, job)
    events.add(connection, told)
