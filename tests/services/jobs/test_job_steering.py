"""Cancel, pause and resume at awkward moments, and what a job may do to which adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_jobs import CALLER, TENANT, ask, ended, jobs_over, supervised, upload

from fake_engine import FakeEngine
from fake_scores import score_of
from learning_world import World
from patience import PATIENCE_S, until
from tandem.core.errors import Conflict, Forbidden, InvalidRequest, QuotaExceeded
from tandem.core.learning import JobRecord, JobStatus, VersionState
from tandem.core.training import ScoreRequest, TrainingStep
from tandem.core.version import INTERNAL, AdapterVersion
from tandem.services.jobs import service
from tandem.services.jobs.service import Jobs
from tandem.store import adapters, events


class Slow(FakeEngine):
    """Adopts a version only once `may_adopt` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.adopting = asyncio.Event()
        self.may_adopt = asyncio.Event()

    async def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        """As the fake does, later."""
        self.adopting.set()
        await self.may_adopt.wait()
        return await super().publish_adapter(version)


def worse(request: ScoreRequest, under: str | None) -> float:
    """Candidates have unlearned everything."""
    score = score_of(request.tokens, request.prompt_tokens, under)
    return 100 * score if under is not None and under.startswith(INTERNAL) else score


async def started(world: World, jobs: Jobs, steps: int, count: int = 16) -> JobRecord:
    job = await jobs.create(ask(await upload(world, supervised(count))), CALLER)
    await until(lambda: len(world.engine.steps) >= steps)
    return job


async def published(world: World, jobs: Jobs, **changes: object) -> JobRecord:
    """A job that goes on with an adapter that was made before, if `model` names it."""
    wanted = ask(await upload(world, supervised(4)), **changes)
    return await ended(jobs, (await jobs.create(wanted, CALLER)).job_id)


async def attempts(count: int, call: Callable[[], object]) -> tuple[int, int]:
    """How many of so many calls at once succeeded, and how many were conflicts."""
    answers = await asyncio.gather(*(call() for _ in range(count)), return_exceptions=True)  # type: ignore[call-overload]
    conflicts = sum(isinstance(answer, Conflict) for answer in answers)
    return sum(isinstance(answer, JobRecord) for answer in answers), conflicts


async def test_resuming_at_once_runs_a_job_once(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=0.05)) as (world, jobs):
        job = await started(world, jobs, 2)
        assert await attempts(3, lambda: jobs.pause(job.job_id, TENANT)) == (1, 2)
        assert await attempts(3, lambda: jobs.resume(job.job_id, TENANT)) == (1, 2)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert len(world.engine.steps) == job.total_steps
        history = await world.store.read(events.listed, job.job_id, limit=1000)
        steps = [event.data["step"] for event in history if event.data.get("type") == "metrics"]
        assert sorted(steps) == list(range(1, job.total_steps + 1))


async def test_what_is_cancelled_stays_so(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=0.05)) as (world, jobs):
        job = await started(world, jobs, 2)
        await jobs.pause(job.job_id, TENANT)
        *_, cancelled = await asyncio.gather(
            *(jobs.resume(job.job_id, TENANT) for _ in range(3)),
            jobs.cancel(job.job_id, TENANT),
            return_exceptions=True,
        )
        assert isinstance(cancelled, JobRecord) and cancelled.status is JobStatus.CANCELLED
        await asyncio.sleep(0.05)
        steps = len(world.engine.steps)
        await asyncio.sleep(0.2)
        assert len(world.engine.steps) == steps
        assert (await jobs.find(job.job_id, TENANT)).status is JobStatus.CANCELLED
        with pytest.raises(Conflict, match="cancelled"):
            await jobs.resume(job.job_id, TENANT)


async def test_cancelling_waits_for_what_is_being_published(tmp_path: Path) -> None:
    engine = Slow()
    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
        await asyncio.wait_for(engine.adopting.wait(), PATIENCE_S)
        cancelling = asyncio.create_task(jobs.cancel(job.job_id, TENANT))
        await asyncio.sleep(0.05)
        assert not cancelling.done()
        engine.may_adopt.set()
        with pytest.raises(Conflict, match="succeeded"):
            await cancelling
        job = await jobs.find(job.job_id, TENANT)
        assert job.status is JobStatus.SUCCEEDED and job.result_files
        record = await world.store.read(adapters.find, job.adapter)
        assert record is not None and record.current == engine.adapters[job.adapter].number == 1


async def test_stopping_finishes_what_is_being_published(tmp_path: Path) -> None:
    engine = Slow()
    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
        await asyncio.wait_for(engine.adopting.wait(), PATIENCE_S)
        stopping = asyncio.create_task(jobs.stop())
        await asyncio.sleep(0.05)
        engine.may_adopt.set()
        await stopping
        assert (await jobs.find(job.job_id, TENANT)).status is JobStatus.SUCCEEDED
        assert engine.adapters[job.adapter].number == 1


async def test_cancelling_before_leaves_nothing_of_the_candidate(tmp_path: Path) -> None:
    engine = FakeEngine()
    measuring = asyncio.Event()

    async with jobs_over(tmp_path, engine) as (world, jobs):

        async def measure(*_: object) -> None:
            measuring.set()
            await asyncio.sleep(3600)

        world.tools.examiner.examine = measure  # type: ignore[method-assign, assignment]
        job = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
        await asyncio.wait_for(measuring.wait(), PATIENCE_S)
        job = await jobs.cancel(job.job_id, TENANT)
        assert job.status is JobStatus.CANCELLED and not engine.adapters
        assert not list((tmp_path / "adapters").glob("*/*"))
        assert await world.store.read(adapters.listed) == []


async def test_failed_jobs_leave_no_adapter(tmp_path: Path) -> None:
    def judge(step: TrainingStep) -> str | None:
        return "the loss is not finite"

    async with jobs_over(tmp_path, FakeEngine(judge=judge)) as (world, jobs):
        job = await published(world, jobs, hyperparameters={"batch_size": 1, "n_epochs": 2})
        assert job.status is JobStatus.FAILED
        assert await world.store.read(adapters.listed) == []


async def test_pausing_gives_up_a_step_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_PAUSE_S", 0.05)
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        world.engine.judge = lambda step: setattr(world.engine, "step_s", 3600.0)
        job = await started(world, jobs, 1)
        async with asyncio.timeout(PATIENCE_S):
            job = await jobs.pause(job.job_id, TENANT)
        assert job.status is JobStatus.PAUSED and job.step == len(world.engine.steps) == 1
        world.engine.judge, world.engine.step_s = lambda step: None, 0.0
        await jobs.resume(job.job_id, TENANT)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED and len(world.engine.steps) == job.total_steps


async def test_a_server_that_never_trains_says_so(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=0.05)) as (world, jobs):
        paused = await started(world, jobs, 1)
        await jobs.pause(paused.job_id, TENANT)
        running = await started(world, jobs, 3)
    async with jobs_over(tmp_path, FakeEngine(), trains=False) as (world, jobs):
        with pytest.raises(InvalidRequest, match="never trains"):
            await jobs.create(ask(running.training_file), CALLER)
        with pytest.raises(InvalidRequest, match="never trains"):
            await jobs.resume(paused.job_id, TENANT)
        [last, *_] = await jobs.events(running.job_id, TENANT, None, 1)
        assert last.level == "warning" and "never trains" in last.message
        assert (await jobs.cancel(running.job_id, TENANT)).status is JobStatus.CANCELLED


@pytest.mark.parametrize("gate", ["auto", "manual", "always"])
async def test_an_adapter_keeps_its_gate(tmp_path: Path, gate: str) -> None:
    """A new adapter is the job's own; one that answers already has its gate. The first version is
    beyond the bounds on the canary set, so the second is measured from there."""
    async with jobs_over(tmp_path, FakeEngine(score_as=worse)) as (world, jobs):
        first = await published(world, jobs)
        assert first.status is JobStatus.SUCCEEDED, first.error
        await world.store.write(adapters.set_settings, first.adapter, {"gate": gate})
        second = await published(world, jobs, model=f"demo:{first.adapter}")
        record = await world.store.read(adapters.find, first.adapter)
        version = await world.store.read(adapters.version, first.adapter, 2)
        assert record is not None and version is not None and version.origin == second.job_id
        if gate == "always":
            assert second.status is JobStatus.SUCCEEDED and record.current == 2
            return
        assert second.status is JobStatus.FAILED and second.error["code"] == "refused_by_gate"
        assert "chosen answers became less likely" in second.error["message"]
        assert version.state is VersionState.REFUSED and Path(version.path).is_dir()
        assert record.current == world.engine.adapters[first.adapter].number == 1


async def test_a_manual_gate_holds_what_a_job_made(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        first = await published(world, jobs)
        await world.store.write(adapters.set_settings, first.adapter, {"gate": "manual"})
        second = await published(world, jobs, model=f"demo:{first.adapter}")
        assert second.status is JobStatus.SUCCEEDED, second.error
        version = await world.store.read(adapters.version, first.adapter, 2)
        assert version is not None and version.state is VersionState.CANDIDATE
        assert world.engine.adapters[first.adapter].number == 1
        told = [event.message for event in await jobs.events(second.job_id, TENANT, None, 3)]
        assert any("waits for a decision" in message for message in told)


async def test_samples_of_jobs_count_for_the_key(tmp_path: Path) -> None:
    capped = replace(CALLER, admin=False, samples_cap=5)
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        first = await published(world, jobs)
        wanted = ask(await upload(world, supervised(3)), model=f"demo:{first.adapter}")
        with pytest.raises(QuotaExceeded, match="5 samples"):  # the 4 of before count, too
            await jobs.create(wanted, capped)
        assert [job.job_id for job in await jobs.listed(TENANT, None, 10)] == [first.job_id]


async def test_the_name_that_is_made_must_be_allowed(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        wanted = ask(await upload(world, supervised(1)), suffix="formal")
        with pytest.raises(Forbidden, match="formal-"):
            await jobs.create(wanted, replace(CALLER, admin=False, train=("formal",)))
        job = await jobs.create(wanted, replace(CALLER, admin=False, train=("formal-*",)))
        assert job.adapter.startswith("formal-")


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled"])
async def test_ended_jobs_keep_no_optimiser_state(tmp_path: Path, end: str) -> None:
    """A paused one does: it goes on from there."""
    async with jobs_over(tmp_path, FakeEngine(step_s=0.02)) as (world, jobs):
        job = await started(world, jobs, 2)
        job = await jobs.pause(job.job_id, TENANT)
        assert states_below(tmp_path / "jobs") == [Path(job.checkpoint_path)]
        if end == "failed":
            world.engine.judge = lambda step: "the loss is not finite"
        await jobs.resume(job.job_id, TENANT)
        if end == "cancelled":
            job = await jobs.cancel(job.job_id, TENANT)
        else:
            job = await ended(jobs, job.job_id)
            await until(lambda: f"job/{job.job_id}" not in world.engine.trainers)
        assert job.status.value == end
        assert Path(job.checkpoint_path, "adapter_config.json").is_file()
        await until(lambda: not states_below(tmp_path / "jobs"))  # after the trainer is closed


async def test_a_job_keeps_the_optimiser_state_of_its_newest_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have a thousand epochs."""
    monkeypatch.setattr(service, "_PAUSE_S", 0.05)
    async with jobs_over(tmp_path, FakeEngine(most_steps=4)) as (world, jobs):
        given = {"n_epochs": 50, "batch_size": 4}
        wanted = ask(await upload(world, supervised(4)), hyperparameters=given)
        job = await jobs.create(wanted, CALLER)
        await until(lambda: len(world.engine.steps) == 4)
        job = await jobs.pause(job.job_id, TENANT)
        kept = [path.parent for path in (tmp_path / "jobs").rglob("adapter_config.json")]
        assert len(kept) >= 3 and states_below(tmp_path / "jobs") == [Path(job.checkpoint_path)]


def states_below(directory: Path) -> list[Path]:
    return [file.parent for file in directory.rglob("trainer_state.json")]


async def test_a_job_keeps_its_epochs_where_auto_means_something_else_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=0.03)) as (world, jobs):
        wanted = ask(await upload(world, supervised(8)), hyperparameters=None)
        job = await jobs.create(wanted, CALLER)
        await until(lambda: len(world.engine.steps) >= 2)
        await jobs.pause(job.job_id, TENANT)
        monkeypatch.setattr("tandem.services.jobs.method.LEAST_WAY", 20.0)
        await jobs.resume(job.job_id, TENANT)
        job = await ended(jobs, job.job_id)
        assert (job.status, job.step, job.total_steps) == (JobStatus.SUCCEEDED, 9, 9), job.error
