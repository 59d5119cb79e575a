"""A job on an adapter that also learns from feedback: nothing is lost, and lineage is true."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import test_jobs
from test_jobs import CALLER, TENANT, ask, ended, jobs_over, supervised, upload

from fake_engine import FakeEngine
from learning_world import World, join
from patience import PATIENCE_S, until
from tandem.adapters.files import inspect_adapter
from tandem.core.errors import AdapterError, WrongStatus
from tandem.core.learning import JobRecord, JobStatus, SampleState, Split, VersionRecord
from tandem.core.ports import EngineState
from tandem.core.version import AdapterVersion
from tandem.services import tasks
from tandem.services.jobs import run
from tandem.services.jobs.service import Jobs
from tandem.store import adapters, events, samples


async def made(world: World, jobs: Jobs) -> str:
    """An adapter with version 1."""
    job = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
    job = await ended(jobs, job.job_id)
    assert job.status is JobStatus.SUCCEEDED, job.error
    return job.adapter


class Reluctant(FakeEngine):
    """Does not take a version that is to answer, the first times."""

    refusals = 2

    async def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        """As the fake does."""
        if self.refusals and not version.internal:
            self.refusals -= 1
            raise AdapterError("it cannot be read just now")
        return await super().publish_adapter(version)


async def test_a_job_whose_version_is_committed_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.05)
    engine = Reluctant()
    async with jobs_over(tmp_path, engine) as (world, jobs):
        name = await made(world, jobs)
        [job] = await jobs.listed(TENANT, None, 10)
        told = [event.message for event in await jobs.events(job.job_id, TENANT, None, 100)]
        assert any("does not answer yet" in line and "just now" in line for line in told)
        await until(lambda: name in engine.adapters)
        assert engine.adapters[name].number == 1 and not engine.refusals


async def continued(world: World, jobs: Jobs, name: str, count: int = 24) -> JobRecord:
    """A job on that adapter that has its place in the order: its file has been read."""
    file_id = await upload(world, supervised(count))
    job = await jobs.create(ask(file_id, model=f"demo:{name}"), CALLER)
    async with asyncio.timeout(PATIENCE_S):
        while (await jobs.find(job.job_id, TENANT)).status is JobStatus.VALIDATING:
            await asyncio.sleep(0.01)
    return job


async def give(world: World, name: str) -> None:
    await world.give([world.sample(adapter=name) for _ in range(6)])
    world.learner.notify(name)


async def lineage(world: World, name: str) -> list[tuple[int, int, str]]:
    """Number, parent and origin of each version."""
    known: list[VersionRecord] = await world.store.read(adapters.versions, name)
    return [(version.number, version.parent, version.origin) for version in known]


async def grown(world: World, name: str, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(await lineage(world, name)) < count:
            await asyncio.sleep(0.02)


async def test_feedback_waits_for_a_job_and_is_learned_after_it(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        world.engine.step_s = 0.03
        job = await continued(world, jobs, name)
        await until(lambda: f"job/{job.job_id}" in world.engine.trainers)
        await give(world, name)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        await grown(world, name, 3)
        first, second, third = await lineage(world, name)
        assert second == (2, 1, job.job_id) and third == (3, 2, "feedback") and first[0] == 1
        learner = [spec for spec in world.engine.spec_of.values() if spec.name == f"learn/{name}"]
        assert learner[0].source.endswith("/2")
        counted = (await world.store.read(samples.counts))[name][Split.TRAIN]
        assert counted == {SampleState.CONSUMED: 6}
        told = [event.message for event in await world.store.read(events.listed, name)]
        assert f"trained by {job.job_id}; feedback waits for its end" in told


async def test_what_feedback_was_being_learned_is_learned_after_the_job(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        world.engine.most_steps = 0
        await give(world, name)
        await until(lambda: f"learn/{name}" in world.engine.trainers)
        job = await continued(world, jobs, name, count=4)
        await until(lambda: f"learn/{name}" not in world.engine.trainers)
        world.engine.most_steps = math.inf
        assert (await ended(jobs, job.job_id)).status is JobStatus.SUCCEEDED
        await grown(world, name, 3)
        assert (await lineage(world, name))[1:] == [(2, 1, job.job_id), (3, 2, "feedback")]


@pytest.mark.parametrize("committed", [False, True])
async def test_feedback_waits_across_a_restart(tmp_path: Path, committed: bool) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        steps = len(world.engine.steps)
        world.engine.most_steps = steps + (12 if committed else 2)
        job = await continued(world, jobs, name)
        await until(lambda: len(world.engine.steps) == world.engine.most_steps)
        await give(world, name)
    job = await find(tmp_path, job)
    assert job.status is JobStatus.RUNNING
    assert bool(job.step) == committed and job.start_version == 1
    engine = FakeEngine(step_s=0.03)
    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        await grown(world, name, 3)
        assert (await lineage(world, name))[1:] == [(2, 1, job.job_id), (3, 2, "feedback")]


async def test_a_jobs_version_shows_what_was_learned_before_it(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        await give(world, name)
        await grown(world, name, 2)
        job = await continued(world, jobs, name, count=2)
        assert (await ended(jobs, job.job_id)).status is JobStatus.SUCCEEDED
        world.tools.freshness.answered(f"{name}@3")
        seen = "tandem_learning_freshness_seconds_count"
        assert world.registry.get_sample_value(seen, {"adapter": name}) == 6


async def find(directory: Path, job: JobRecord) -> JobRecord:
    engine = FakeEngine(state=EngineState.READY, step_s=3600.0)
    async with jobs_over(directory, engine, trains=False) as (_, jobs):
        return await jobs.find(job.job_id, TENANT)


async def test_feedback_goes_on_while_a_job_is_paused(tmp_path: Path) -> None:
    """The job can then go on only from the version that it began from."""
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        steps = len(world.engine.steps)
        world.engine.step_s = 0.02
        job = await continued(world, jobs, name)
        await until(lambda: len(world.engine.steps) >= steps + 2)
        await jobs.pause(job.job_id, TENANT)
        world.engine.step_s = 0.0
        await give(world, name)
        await grown(world, name, 2)
        with pytest.raises(WrongStatus, match="went from version 1 to 2") as refused:
            await jobs.resume(job.job_id, TENANT)
        assert f"jobs/{job.job_id}/" in str(refused.value) and refused.value.param == "model"
        assert (await jobs.find(job.job_id, TENANT)).status is JobStatus.PAUSED
        await world.store.write(adapters.set_current, name, 1)
        await jobs.resume(job.job_id, TENANT)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert (await lineage(world, name))[1:] == [(2, 1, "feedback"), (3, 1, job.job_id)]


async def back_to_the_base(world: World, name: str) -> None:
    await world.store.write(adapters.set_current, name, 0)


async def deleted(world: World, name: str) -> None:
    await world.store.write(adapters.delete, name)


@pytest.mark.parametrize(
    ("change", "told", "left"),
    [(back_to_the_base, "from version 1 to 0", 1), (deleted, "deleted since the job began", 0)],
)
async def test_a_job_does_not_undo_what_an_administrator_did_meanwhile(
    tmp_path: Path, change: Callable[[World, str], Awaitable[None]], told: str, left: int
) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        world.engine.step_s = 0.02
        job = await continued(world, jobs, name)
        steps = len(world.engine.steps)
        await until(lambda: len(world.engine.steps) >= steps + 2)
        async with world.learner.held(name):
            await change(world, name)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.FAILED and job.error["code"] == "adapter_changed"
        assert told in job.error["message"] and 0 < job.step < job.total_steps
        assert len(await lineage(world, name)) == left


async def test_jobs_on_one_adapter_follow_each_other(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        world.engine.step_s = 0.01
        second, third = [await continued(world, jobs, name, count=6) for _ in range(2)]
        other = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
        assert (await ended(jobs, other.job_id)).status is JobStatus.SUCCEEDED  # its slot is free
        assert (await ended(jobs, third.job_id)).status is JobStatus.SUCCEEDED
        assert (await lineage(world, name))[1:] == [(2, 1, second.job_id), (3, 2, third.job_id)]


async def test_a_paused_job_does_not_go_on_beside_another_one(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        steps = len(world.engine.steps)
        world.engine.step_s = 0.02
        paused = await continued(world, jobs, name)
        await until(lambda: len(world.engine.steps) >= steps + 2)
        await jobs.pause(paused.job_id, TENANT)
        other = await continued(world, jobs, name)
        await until(lambda: f"job/{other.job_id}" in world.engine.trainers)
        with pytest.raises(WrongStatus, match=f"{other.job_id} trains"):
            await jobs.resume(paused.job_id, TENANT)
        await jobs.cancel(other.job_id, TENANT)
        await jobs.resume(paused.job_id, TENANT)
        assert (await ended(jobs, paused.job_id)).status is JobStatus.SUCCEEDED


@pytest.mark.parametrize("fresh", [1, 3])
async def test_a_resumed_job_goes_before_those_that_have_not_begun(
    tmp_path: Path, fresh: int
) -> None:
    """Behind them, it would find the adapter changed."""
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        steps = len(world.engine.steps)
        world.engine.step_s = 0.02
        begun = await continued(world, jobs, name)
        await until(lambda: len(world.engine.steps) >= steps + 2)
        await jobs.pause(begun.job_id, TENANT)
        world.engine.step_s = 3600.0
        file = await upload(world, supervised(2))
        busy = [await jobs.create(ask(file), CALLER) for _ in range(2)]
        await until(lambda: len(world.engine.trainers) == 2)
        later = [await continued(world, jobs, name, count=2) for _ in range(fresh)]
        await asyncio.sleep(0.2)  # the first of them has its turn, and waits for a slot
        await jobs.resume(begun.job_id, TENANT)
        world.engine.step_s = 0.0
        await jobs.cancel(busy[0].job_id, TENANT)
        for job in [begun, *later]:
            job = await ended(jobs, job.job_id)
            assert job.status is JobStatus.SUCCEEDED, job.error
        origins = [origin for _, _, origin in await lineage(world, name)]
        assert origins[1:] == [job.job_id for job in [begun, *later]]


@pytest.mark.parametrize("then", ["room", "pause", "cancel"])
async def test_a_version_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """What was learned is not thrown away because others came meanwhile."""
    monkeypatch.setattr(test_jobs, "join", partial(join, max_adapters=1))
    monkeypatch.setattr(run, "_LOOK_FOR_ROOM_S", 0.02)
    engine = FakeEngine(step_s=0.02)
    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(6))), CALLER)
        await until(lambda: bool(engine.steps))
        await engine.load_adapter("loaded", str(tmp_path))

        async def told() -> list[str]:
            told = [event.message for event in await jobs.events(job.job_id, TENANT, None, 100)]
            return [line for line in told if "The version waits: 1 adapters are loaded" in line]

        await until(told)
        await asyncio.sleep(0.1)
        assert len(await told()) == 1 and len(engine.steps) == 6
        job = await jobs.find(job.job_id, TENANT)
        assert job.status is JobStatus.RUNNING and job.step == job.total_steps == 6
        assert await world.store.read(adapters.listed) == []
        if then == "cancel":
            assert (await jobs.cancel(job.job_id, TENANT)).status is JobStatus.CANCELLED
            assert await world.store.read(adapters.listed) == []
            return
        if then == "pause":
            assert (await jobs.pause(job.job_id, TENANT)).status is JobStatus.PAUSED
            await jobs.resume(job.job_id, TENANT)
        await engine.unload_adapter("loaded")
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert len(engine.steps) == 6 and engine.adapters[job.adapter].number == 1


async def test_versions_that_wait_for_room_let_others_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_jobs, "join", partial(join, max_adapters=1))
    monkeypatch.setattr(run, "_LOOK_FOR_ROOM_S", 0.02)
    engine = FakeEngine(most_steps=0)
    async with jobs_over(tmp_path, engine) as (world, jobs):
        file = await upload(world, supervised(6))
        waiting = [await jobs.create(ask(file), CALLER) for _ in range(2)]
        await until(lambda: len(engine.trainers) == 2)
        hand = tmp_path / "hand"
        hand.mkdir()
        (hand / "adapter_config.json").write_text("{}")
        (hand / "adapter_model.safetensors").write_text("by hand")
        content_hash = inspect_adapter(hand).content_hash
        engine.adapters["loaded"] = AdapterVersion("loaded", 1, content_hash, str(hand))
        engine.most_steps = math.inf
        other = await jobs.create(ask(file, model="demo:loaded"), CALLER)
        other = await ended(jobs, other.job_id)
        assert other.status is JobStatus.SUCCEEDED, other.error
        await until(lambda: not engine.trainers)  # nor do they keep theirs in memory
        for job in waiting:
            assert (await jobs.find(job.job_id, TENANT)).status is JobStatus.RUNNING
        await jobs.cancel(waiting[1].job_id, TENANT)
        await engine.unload_adapter("loaded")
        job = await ended(jobs, waiting[0].job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error


async def test_room_that_is_lost_while_the_gate_measures_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_jobs, "join", partial(join, max_adapters=1))
    monkeypatch.setattr(run, "_LOOK_FOR_ROOM_S", 0.02)
    engine = FakeEngine()
    async with jobs_over(tmp_path, engine) as (world, jobs):
        whole = world.tools.examiner.examine

        async def examine(*given: object) -> object:
            verdict = await whole(*given)  # type: ignore[arg-type]
            await engine.load_adapter("loaded", str(tmp_path))
            return verdict

        world.tools.examiner.examine = examine  # type: ignore[method-assign, assignment]
        job = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
        await until(lambda: "loaded" in engine.adapters)
        await asyncio.sleep(0.1)
        assert await world.store.read(adapters.listed) == []
        await until(lambda: set(engine.adapters) == {"loaded"})  # no candidate is left
        world.tools.examiner.examine = whole  # type: ignore[method-assign]
        await engine.unload_adapter("loaded")
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert (await lineage(world, job.adapter)) == [(1, 0, job.job_id)]
