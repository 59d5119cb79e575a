"""When jobs are validated and trained, and how they outlive a store that fails for a while."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_jobs import CALLER, TENANT, ask, ended, jobs_over, supervised, upload

from fake_engine import FakeEngine
from patience import PATIENCE_S, until
from tandem.core.errors import OutOfMemory, StoreError, TandemError
from tandem.core.learning import JobStatus, VersionState
from tandem.core.ports import EngineState
from tandem.core.version import AdapterVersion
from tandem.services import tasks
from tandem.services.jobs import run, service
from tandem.services.jobs.service import Jobs
from tandem.store import Store, adapters

Status = JobStatus


async def reached(jobs_: Jobs, job_id: str, status: JobStatus) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await jobs_.find(job_id, TENANT)).status is not status:
            await asyncio.sleep(0.01)


async def messages(jobs_: Jobs, job_id: str) -> list[str]:
    """What the events say, oldest first."""
    return [event.message for event in await jobs_.events(job_id, TENANT, None, 1000)][::-1]


async def test_validation_does_not_wait_for_a_slot_and_training_does(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=3600.0)) as (world, jobs_):
        good = await upload(world, supervised(2))
        long = [await jobs_.create(ask(good), CALLER) for _ in range(2)]
        for job in long:
            await reached(jobs_, job.job_id, Status.RUNNING)
        broken = await jobs_.create(ask(await upload(world, [{"messages": []}])), CALLER)
        assert (await ended(jobs_, broken.job_id)).status is Status.FAILED
        waiting = await jobs_.create(ask(good), CALLER)
        await reached(jobs_, waiting.job_id, Status.QUEUED)
        await asyncio.sleep(0.1)
        job = await jobs_.find(waiting.job_id, TENANT)
        assert job.status is Status.QUEUED and job.total_steps == 2
        world.engine.step_s = 0.0
        await jobs_.cancel(long[0].job_id, TENANT)
        job = await ended(jobs_, waiting.job_id)
        assert job.status is Status.SUCCEEDED, job.error
        assert (await messages(jobs_, job.job_id))[:4] == [
            f"Created fine-tuning job: {job.job_id}",
            f"Validating training file: {good}",
            "Files validated, moving job to queued state",
            "Fine-tuning job started",
        ]


@pytest.mark.parametrize("status", [Status.VALIDATING, Status.QUEUED, Status.RUNNING])
@pytest.mark.parametrize("good", [True, False])
async def test_a_restart_goes_on_from_each_status(
    tmp_path: Path, status: JobStatus, good: bool
) -> None:
    engine = FakeEngine(step_s=3600.0)
    async with jobs_over(tmp_path, engine) as (world, jobs_):
        first = await upload(world, supervised(2))
        others = []
        for _ in range(2):
            others.append(await jobs_.create(ask(first), CALLER))
            await reached(jobs_, others[-1].job_id, Status.RUNNING)
        if status is Status.VALIDATING:
            engine.state = EngineState.STARTING
        file_id = await upload(world, supervised(2))
        job = await jobs_.create(ask(file_id), CALLER)
        if status is not Status.VALIDATING:
            await reached(jobs_, job.job_id, Status.QUEUED)
        if status is Status.RUNNING:
            await jobs_.cancel(others[0].job_id, TENANT)
            await reached(jobs_, job.job_id, Status.RUNNING)
        await asyncio.sleep(0.05)
    if not good:
        next(tmp_path.glob("upload-1")).write_bytes(b'{"messages": []}')
    async with jobs_over(tmp_path, FakeEngine(), trains=False) as (_, again):
        assert (await again.find(job.job_id, TENANT)).status is status
    async with jobs_over(tmp_path, FakeEngine()) as (_, again):
        job = await ended(again, job.job_id)
        assert job.status is (Status.SUCCEEDED if good else Status.FAILED), job.error
        told = await messages(again, job.job_id)
        assert told.count("Files validated, moving job to queued state") == (
            good or status is not Status.VALIDATING
        )
        assert (await ended(again, others[1].job_id)).status is Status.SUCCEEDED


async def test_what_was_paused_before_it_was_validated_is_validated_then(tmp_path: Path) -> None:
    engine = FakeEngine(state=EngineState.STARTING)
    async with jobs_over(tmp_path, engine) as (world, jobs_):
        job = await jobs_.create(ask(await upload(world, supervised(2))), CALLER)
        await asyncio.sleep(0.05)
        job = await jobs_.pause(job.job_id, TENANT)
        assert job.status is Status.PAUSED and not job.total_steps
        assert (await jobs_.resume(job.job_id, TENANT)).status is Status.VALIDATING
        await engine.start()
        job = await ended(jobs_, job.job_id)
        assert job.status is Status.SUCCEEDED, job.error


class Flaky:
    """Some writes of a store fail, by their number: before (True) or after they were done."""

    def __init__(self, store: Store, failures: dict[int, bool]) -> None:
        self._write = store.write
        self._failures = failures
        self.count = 0

    async def write(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `Store.write`."""
        self.count += 1
        fails = self._failures.get(self.count)
        if fails is True:
            raise StoreError("cannot write: the disk is away")
        done = await self._write(work, *args, **kwargs)
        if fails is False:
            raise StoreError("cannot write: nobody knows what was written")
        return done


async def run_beside_failures(directory: Path, failures: dict[int, bool]) -> None:
    async with jobs_over(directory, FakeEngine()) as (world, jobs_):
        job = await jobs_.create(ask(await upload(world, supervised(24))), CALLER)
        flaky = Flaky(world.store, failures)
        world.store.write = flaky.write  # type: ignore[method-assign]
        job = await ended(jobs_, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert flaky.count >= 24
        made = await world.store.read(adapters.versions, job.adapter)
        assert [version.state for version in made] == [VersionState.PUBLISHED]
        assert world.engine.adapters[job.adapter].number == made[0].number
        # What was committed is not trained again: at most a segment for each failure.
        assert len(world.engine.steps) <= 24 + 10 * len(failures)


@settings(max_examples=20)
@given(failures=st.dictionaries(st.integers(1, 45), st.booleans(), min_size=1, max_size=6))
def test_a_store_that_fails_for_a_while_ends_no_job(failures: dict[int, bool]) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "FIRST_S", 0.001)
        asyncio.run(run_beside_failures(Path(directory), failures))


async def test_a_disk_that_does_not_take_checkpoints_for_a_while_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.001)
    engine = FakeEngine()
    stage, tries = engine.stage, []

    async def full(trainer: str, name: str, path: str) -> AdapterVersion:
        tries.append(path)
        if len(tries) in (1, 2, 4):
            raise StoreError(f"cannot write {path}: no space left on device")
        return await stage(trainer, name, path)

    engine.stage = full  # type: ignore[method-assign]
    async with jobs_over(tmp_path, engine) as (world, jobs_):
        job = await jobs_.create(ask(await upload(world, supervised(24))), CALLER)
        job = await ended(jobs_, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert len(tries) > 4


async def test_what_the_engine_cannot_do_for_a_while_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.001)
    monkeypatch.setattr(run, "_LOOK_FOR_ROOM_S", 0.001)
    engine = FakeEngine()
    stage = engine.stage
    fails = [TandemError("the iteration failed"), OutOfMemory("not now"), TandemError("again")]

    async def full(trainer: str, name: str, path: str) -> AdapterVersion:
        if fails:
            raise fails.pop()
        return await stage(trainer, name, path)

    engine.stage = full  # type: ignore[method-assign]
    async with jobs_over(tmp_path, engine) as (world, jobs_):
        job = await jobs_.create(ask(await upload(world, supervised(24))), CALLER)
        job = await ended(jobs_, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert not fails


async def test_what_the_engine_never_can_do_ends_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.0)
    engine, tries = FakeEngine(), []

    async def fails(*_: str) -> AdapterVersion:
        tries.append(1)
        raise TandemError("the iteration failed")

    engine.stage = fails  # type: ignore[method-assign]
    async with jobs_over(tmp_path, engine) as (world, jobs_):
        job = await jobs_.create(ask(await upload(world, supervised(4))), CALLER)
        job = await ended(jobs_, job.job_id)
        assert job.status is JobStatus.FAILED and job.error["code"] == "training_failed"
        assert "failed 20 times in a row" in job.error["message"] and len(tries) == 20


async def test_a_job_can_be_paused_and_cancelled_while_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 60.0)
    async with jobs_over(tmp_path, FakeEngine(step_s=0.02)) as (world, jobs_):
        job = await jobs_.create(ask(await upload(world, supervised(24))), CALLER)
        await until(lambda: len(world.engine.steps) >= 2)
        whole = world.store.write
        world.store.write = Flaky(world.store, {1: True}).write  # type: ignore[method-assign]
        await until(lambda: f"job/{job.job_id}" in world.engine.closed)
        world.store.write = whole  # type: ignore[method-assign]
        async with asyncio.timeout(PATIENCE_S):
            assert (await jobs_.pause(job.job_id, TENANT)).status is JobStatus.PAUSED
            assert (await jobs_.cancel(job.job_id, TENANT)).status is JobStatus.CANCELLED


async def test_a_bug_ends_the_job_and_no_other(tmp_path: Path) -> None:
    def broken(_: object) -> str | None:
        raise ZeroDivisionError

    async with jobs_over(tmp_path, FakeEngine(judge=broken)) as (world, jobs_):
        file_id = await upload(world, supervised(2))
        job = await ended(jobs_, (await jobs_.create(ask(file_id), CALLER)).job_id)
        assert job.status is Status.FAILED and job.error["code"] == "server_error"
        world.engine.judge = lambda step: None
        job = await ended(jobs_, (await jobs_.create(ask(file_id), CALLER)).job_id)
        assert job.status is Status.SUCCEEDED


async def test_directories_that_nothing_names_are_gone_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of jobs that go on stay, and those that ended jobs name."""
    monkeypatch.setattr(service, "_PAUSE_S", 0.05)
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        file = await upload(world, supervised(4))
        done = await ended(jobs, (await jobs.create(ask(file), CALLER)).job_id)
        kept = [Path(each.path) for each in await jobs.checkpoints(done.job_id, TENANT, None, 10)]
        file, under_way = await upload(world, supervised(16)), []
        for _ in range(2):
            world.engine.most_steps = len(world.engine.steps) + 1
            job = await jobs.create(ask(file), CALLER)
            await until(lambda: len(world.engine.steps) == world.engine.most_steps)
            under_way.append(await jobs.pause(job.job_id, TENANT))
        paused, given_up = under_way
        await jobs.cancel(given_up.job_id, TENANT)
        kept += [Path(job.checkpoint_path) for job in under_way]
    assert len({*kept}) == 4 and all(path.is_dir() for path in kept)
    strays = [kept[0].with_name("7"), tmp_path / "jobs" / "ftjob-nobody" / "1"]
    for stray in strays:
        shutil.copytree(kept[0], stray)
    (tmp_path / "jobs" / "ftjob-nobody" / "notes").write_text("a file is left alone")
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        assert not any(stray.exists() for stray in strays)
        assert all(path.is_dir() for path in kept)
        await jobs.resume(paused.job_id, TENANT)
        assert (await ended(jobs, paused.job_id)).status is JobStatus.SUCCEEDED


async def test_training_files_are_counted_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes its whole file into memory; also one whose client has left."""
    counting, most, go_on = 0, 0, threading.Event()

    def count(*_: object) -> int:
        nonlocal counting, most
        counting += 1
        most = max(most, counting)
        assert go_on.wait(PATIENCE_S)
        time.sleep(0.02)
        counting -= 1
        return 2

    monkeypatch.setattr(service, "_count", count)
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        file = await upload(world, supervised(2))
        left, *others = [asyncio.create_task(jobs.create(ask(file), CALLER)) for _ in range(3)]
        await until(lambda: counting == 1)
        left.cancel()
        await asyncio.sleep(0.05)
        go_on.set()
        await asyncio.gather(*others)
        assert left.cancelled() and most == 1
