"""Pause, cancel and resume beside a store that fails: answered soon, and no job is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_job_steering import Slow, started
from test_job_workers import reached
from test_jobs import CALLER, TENANT, ask, ended, jobs_over, supervised, upload

from fake_engine import FakeEngine
from learning_world import World, lose
from patience import PATIENCE_S, until
from tandem.core.errors import StoreError, WrongStatus
from tandem.core.learning import JobRecord, JobStatus, VersionState
from tandem.core.version import AdapterVersion
from tandem.services import tasks
from tandem.services.jobs import service, workers
from tandem.services.jobs.service import Jobs
from tandem.store import adapters

Status = JobStatus


async def steer(jobs: Jobs, how: str, job_id: str) -> JobRecord:
    """`how` is cancel, pause or resume; answered in time."""
    async with asyncio.timeout(PATIENCE_S):
        calls = {"cancel": jobs.cancel, "pause": jobs.pause, "resume": jobs.resume}
        return await calls[how](job_id, TENANT)


async def answers(world: World, job: JobRecord) -> None:
    """The job has succeeded with one version, which answers."""
    assert job.status is Status.SUCCEEDED, job.error
    [version] = await world.store.read(adapters.versions, job.adapter)
    assert version.state is VersionState.PUBLISHED and version.origin == job.job_id
    assert world.engine.adapters[job.adapter].number == version.number


@pytest.mark.parametrize("how", ["cancel", "pause"])
@pytest.mark.parametrize("lost", ["the version", "the end"])
async def test_a_job_whose_version_is_committed_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, lost: str
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 60.0)
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        if lost == "the version":  # it was committed, and nobody has heard of it
            failed = lose(world.store, adapters.publish)
        else:
            failed = lose(world.store, service._succeed, done=False)
        job = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
        await until(lambda: bool(failed) and not world.engine.trainers)  # it waits for a minute
        with pytest.raises(WrongStatus, match=f"made version 1 .* cannot be {how}"):
            await steer(jobs, how, job.job_id)
        await answers(world, await ended(jobs, job.job_id))


async def test_cancelling_while_the_version_is_adopted_lets_the_job_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the job fails, and nobody would try it again."""
    monkeypatch.setattr(tasks, "FIRST_S", 60.0)
    engine = Slow()
    async with jobs_over(tmp_path, engine) as (world, jobs):
        lose(world.store, service._succeed, done=False)
        job = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
        await asyncio.wait_for(engine.adopting.wait(), PATIENCE_S)
        cancelling = asyncio.create_task(steer(jobs, "cancel", job.job_id))
        await asyncio.sleep(0.05)
        engine.may_adopt.set()
        with pytest.raises(WrongStatus, match="made version 1"):
            await cancelling
        await answers(world, await ended(jobs, job.job_id))


@pytest.mark.parametrize("how", ["pause", "cancel"])
async def test_a_store_that_fails_delays_nobody_who_stops_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.05)
    async with jobs_over(tmp_path, FakeEngine(step_s=0.02)) as (world, jobs):
        job = await started(world, jobs, 2)
        whole = world.store.write

        async def away(*given: Any, **named: Any) -> Any:
            raise StoreError("cannot write: the disk is away")

        world.store.write = away  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(StoreError):
                await steer(jobs, how, job.job_id)
        world.store.write = whole  # type: ignore[method-assign]
        await answers(world, await ended(jobs, job.job_id))  # it went on


async def test_a_pause_gives_up_a_commit_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 60.0)
    engine = FakeEngine(step_s=0.02)
    whole = engine.stage

    async def full(trainer: str, name: str, path: str) -> AdapterVersion:
        raise StoreError(f"cannot write {path}: no space left on device")

    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await started(world, jobs, 12, count=48)
        engine.stage = full  # type: ignore[method-assign]
        job = await steer(jobs, "pause", job.job_id)
        assert job.status is Status.PAUSED and job.step == 10
        engine.stage = whole  # type: ignore[method-assign]
        await steer(jobs, "resume", job.job_id)
        await answers(world, await ended(jobs, job.job_id))


async def test_a_pause_gives_up_a_commit_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_PAUSE_S", 0.05)
    monkeypatch.setattr(workers, "_COMMIT_S", 0.05)
    engine = FakeEngine(step_s=0.02)
    whole = engine.stage

    async def slow(trainer: str, name: str, path: str) -> AdapterVersion:
        await asyncio.sleep(3600)
        return await whole(trainer, name, path)

    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await started(world, jobs, 12, count=48)
        engine.stage = slow  # type: ignore[method-assign]
        job = await steer(jobs, "pause", job.job_id)
        assert job.status is Status.PAUSED and job.step == 10


@pytest.mark.parametrize("done", [True, False])
async def test_an_answer_that_is_lost_leaves_no_job_behind(tmp_path: Path, done: bool) -> None:
    """Whatever the store has kept, somebody works on each job that is open."""
    async with jobs_over(tmp_path, FakeEngine(step_s=0.05)) as (world, jobs):
        job = await started(world, jobs, 2)
        lose(world.store, service._move, done=done)
        with pytest.raises(StoreError):
            await steer(jobs, "cancel" if not done else "pause", job.job_id)
        if done:
            await reached(jobs, job.job_id, Status.PAUSED)
        else:
            await reached(jobs, job.job_id, Status.RUNNING)
            await steer(jobs, "pause", job.job_id)
        lose(world.store, service._resume, done=done)
        with pytest.raises(StoreError):
            await steer(jobs, "resume", job.job_id)
        if not done:
            await steer(jobs, "resume", job.job_id)
        await answers(world, await ended(jobs, job.job_id))


@pytest.mark.parametrize("done", [True, False])
async def test_a_job_whose_making_nobody_acknowledged_is_worked_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    done: bool,
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.01)
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        file = await upload(world, supervised(2))
        lose(world.store, service._add, done=done)
        with pytest.raises(StoreError):
            await jobs.create(ask(file), CALLER)
        made = await jobs.listed(TENANT, None, 10)
        assert len(made) == done
        await until(lambda: done or not jobs._workers._tasks)
        for job in made or [await jobs.create(ask(file), CALLER)]:
            await answers(world, await ended(jobs, job.job_id))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_job_whose_making_is_seen_late_is_worked_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was lost while the database committed."""
    asked: list[asyncio.Task[None]] = []

    async def once_it_is_there(_: tasks.Backoff) -> None:
        await asyncio.sleep(0.05)
        await asyncio.gather(*asked)

    monkeypatch.setattr(tasks.Backoff, "wait", once_it_is_there)
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        file = await upload(world, supervised(2))
        write = world.store.write

        async def late(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if work is service._add and not asked:
                asked.append(asyncio.create_task(_later(write(work, *args, **kwargs))))
                raise StoreError("cannot write: the connection is lost")
            return await write(work, *args, **kwargs)

        monkeypatch.setattr(world.store, "write", late)
        with pytest.raises(StoreError):
            await jobs.create(ask(file), CALLER)
        assert await jobs.listed(TENANT, None, 10) == []
        await asked[0]
        [job] = await jobs.listed(TENANT, None, 10)
        await answers(world, await ended(jobs, job.job_id))


async def _later(work: Coroutine[Any, Any, Any]) -> None:
    await asyncio.sleep(0.02)
    await work


async def test_a_resume_does_not_wait_behind_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody knew whether it was paused, it stands in the line again."""
    monkeypatch.setattr(service, "_PAUSE_S", 0.05)
    async with jobs_over(tmp_path, FakeEngine(step_s=0.05)) as (world, jobs):
        job = await started(world, jobs, 2)
        world.engine.step_s = 3600.0
        file = await upload(world, supervised(2))
        others = [await jobs.create(ask(file), CALLER) for _ in range(2)]
        await reached(jobs, others[0].job_id, Status.RUNNING)
        await reached(jobs, others[1].job_id, Status.QUEUED)
        await asyncio.sleep(0.05)
        lose(world.store, service._move)
        with pytest.raises(StoreError):
            await steer(jobs, "pause", job.job_id)
        await reached(jobs, others[1].job_id, Status.RUNNING)
        assert (await steer(jobs, "resume", job.job_id)).status is Status.QUEUED


async def torment(directory: Path, seed: int) -> None:
    """Pause, resume and cancel jobs at random beside a store that fails at random."""
    rng = random.Random(seed)
    async with jobs_over(directory, FakeEngine(step_s=0.002)) as (world, jobs):
        first = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
        name = (await ended(jobs, first.job_id)).adapter
        file = await upload(world, supervised(12))
        wanted = [ask(file, model=f"demo:{name}")] * 3 + [ask(file)]
        made = [await jobs.create(each, CALLER) for each in wanted]
        whole = world.store.write

        async def flaky(work: Callable[..., Any], *given: Any, **named: Any) -> Any:
            chance = rng.random()
            if chance < 0.07:
                raise StoreError("cannot write: the disk is away")
            done = await whole(work, *given, **named)
            if chance > 0.93:
                raise StoreError("cannot write: nobody knows what was written")
            return done

        world.store.write = flaky  # type: ignore[method-assign, assignment]
        for _ in range(25):
            await asyncio.sleep(0.03 * rng.random())
            how = rng.choice(["pause", "resume"] * 4 + ["cancel"])
            with suppress(StoreError, WrongStatus):
                await steer(jobs, how, rng.choice(made).job_id)
        world.store.write = whole  # type: ignore[method-assign]
        for job in made:
            if (await jobs.find(job.job_id, TENANT)).status is Status.PAUSED:
                await steer(jobs, "cancel", job.job_id)
            job = await ended(jobs, job.job_id)
            assert job.status in (Status.SUCCEEDED, Status.CANCELLED), job.error
            known = await world.store.read(adapters.versions, job.adapter)
            count = sum(version.origin == job.job_id for version in known)
            assert count == (job.status is Status.SUCCEEDED)
        record = await world.store.read(adapters.find, name)
        assert record is not None
        await until(lambda: world.engine.adapters[name].number == record.current)


@pytest.mark.parametrize("seed", range(6))
async def test_each_job_ends_with_its_version_or_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.005)
    monkeypatch.setattr(tasks, "LONGEST_S", 0.05)
    monkeypatch.setattr(service, "_PAUSE_S", 0.05)
    await torment(tmp_path, seed)
