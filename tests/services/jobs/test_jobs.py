"""Fine-tuning jobs over the scripted engine and a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from learning_world import World, join
from patience import PATIENCE_S, until
from tandem.adapters.files import inspect_adapter
from tandem.core.errors import Conflict, InvalidRequest, NotFound
from tandem.core.learning import FileRecord, JobRecord, JobStatus, VersionState
from tandem.core.training import OptimizerSpec, Schedule, TrainingStep
from tandem.core.version import AdapterVersion
from tandem.services.answering.models import Models
from tandem.services.auth import Caller
from tandem.services.jobs.service import JobAsk, Jobs
from tandem.services.jobs.tools import JobTools
from tandem.services.learning.publish import nothing
from tandem.services.learning.recovery import recover
from tandem.sim.curves import read_curve
from tandem.store import Store, adapters, events, files

TENANT = "owner"
CALLER = Caller(TENANT)


class Crash(BaseException):
    """The process ends here: no status is written any more."""


@asynccontextmanager
async def jobs_over(
    directory: Path,
    engine: FakeEngine,
    at: Callable[[str], None] = nothing,
    trains: bool = True,
) -> AsyncIterator[tuple[World, Jobs]]:
    store = Store.open(directory)
    made = join(engine, store, directory, trains=trains)
    models = Models(engine, "demo", 0)
    tools = JobTools(made.tools, made.learner, directory, models.announce, at)
    jobs = Jobs(tools, models)
    try:
        await recover(made.tools, directory)
        await made.learner.start()
        await jobs.start()
        yield made, jobs
    finally:
        await jobs.stop()
        await made.learner.stop()
        store.close()


async def upload(world: World, examples: list[dict[str, object]], **changes: object) -> str:
    raw = "\n".join(json.dumps(example) for example in examples).encode()
    number = next(world.numbers)
    path = world.directory / f"upload-{number}"
    path.write_bytes(raw)
    values: dict[str, object] = {
        "file_id": f"file-{number}",
        "created_s": 0.0,
        "filename": "train.jsonl",
        "purpose": "fine-tune",
        "num_bytes": len(raw),
        "path": str(path),
        "tenant": TENANT,
    }
    file = FileRecord(**{**values, **changes})  # type: ignore[arg-type]
    await world.store.write(files.add, file)
    return file.file_id


def supervised(count: int) -> list[dict[str, object]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"Number {n}?"},
                {"role": "assistant", "content": f"It is {n}."},
            ]
        }
        for n in range(count)
    ]


def preferences(count: int) -> list[dict[str, object]]:
    return [
        {
            "input": {"messages": [{"role": "user", "content": f"Number {n}?"}]},
            "preferred_output": [{"role": "assistant", "content": f"It is {n}."}],
            "non_preferred_output": [{"role": "assistant", "content": f"{n}"}],
        }
        for n in range(count)
    ]


def ask(file_id: str, **changes: object) -> JobAsk:
    values: dict[str, object] = {
        "model": "demo",
        "training_file": file_id,
        "suffix": "my style",
        "seed": 3,
        "hyperparameters": {"n_epochs": 2, "batch_size": 2},
    }
    return JobAsk(**{**values, **changes})  # type: ignore[arg-type]


async def ended(jobs: Jobs, job_id: str) -> JobRecord:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            job = await jobs.find(job_id, TENANT)
            if job.finished_s is not None:
                return job
            await asyncio.sleep(0.02)


async def test_a_job_succeeds_with_checkpoints_results_and_a_version(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        training = await upload(world, supervised(5))
        held = await upload(world, supervised(2))
        job = await jobs.create(ask(training, validation_file=held), CALLER)
        assert job.status is JobStatus.VALIDATING and job.adapter.startswith("my-style-")
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert (job.step, job.total_steps) == (6, 6) and job.trained_tokens > 0
        checkpoints = await jobs.checkpoints(job.job_id, TENANT, None, 10)
        assert [record.step for record in checkpoints] == [6, 3]
        await until(lambda: not list(tmp_path.glob("jobs/*/*/trainer_state.json")))
        assert all(Path(record.path, "adapter_config.json").is_file() for record in checkpoints)
        assert "valid_loss" in checkpoints[0].metrics
        [result] = job.result_files
        file = await world.store.read(files.find, result)
        assert file is not None and file.purpose == "fine-tune-results"
        rows = Path(file.path).read_text().splitlines()
        assert rows[0] == "step,train_loss,train_accuracy,valid_loss,valid_accuracy"
        assert [row.split(",")[0] for row in rows[1:]] == ["1", "2", "3", "4", "5", "6"]
        read_curve(Path(file.path))  # a simulation can follow it
        assert world.engine.adapters[job.adapter].number == 1
        version = await world.store.read(adapters.version, job.adapter, 1)
        assert version is not None and version.origin == job.job_id
        assert version.state is VersionState.PUBLISHED
        assert "canary_divergence" in version.metrics
        history = await jobs.events(job.job_id, TENANT, None, 100)
        assert history[0].message == "The job has successfully completed"
        assert history[-1].message.startswith("Created fine-tuning job")
        assert f"job/{job.job_id}" not in world.engine.trainers


async def test_preferences_report_accuracy(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        training = await upload(world, preferences(4))
        wanted = ask(training, method={"type": "dpo"}, hyperparameters=None)
        job = await ended(jobs, (await jobs.create(wanted, CALLER)).job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        history = await jobs.events(job.job_id, TENANT, None, 100)
        steps = [event.data for event in history if event.data.get("type") == "metrics"]
        assert len(steps) == 9 and all("train_accuracy" in data for data in steps)


async def test_a_bad_line_fails_the_job_with_its_number(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        training = await upload(world, [*supervised(2), {"messages": []}])
        job = await ended(jobs, (await jobs.create(ask(training), CALLER)).job_id)
        assert job.status is JobStatus.FAILED
        assert job.error["param"] == "training_file" and "line 3" in job.error["message"]
        long = await upload(
            world,
            [
                *supervised(1),
                {
                    "messages": [
                        {"role": "user", "content": "Long?"},
                        {"role": "assistant", "content": "word " * 500},
                    ]
                },
            ],
        )
        job = await ended(jobs, (await jobs.create(ask(long), CALLER)).job_id)
        assert job.status is JobStatus.FAILED and "line 2" in job.error["message"]


async def test_files_and_jobs_belong_to_their_tenant(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=0.2)) as (world, jobs):
        foreign = await upload(world, supervised(1), tenant="somebody else")
        with pytest.raises(InvalidRequest, match="does not exist"):
            await jobs.create(ask(foreign), CALLER)
        batch = await upload(world, supervised(1), purpose="batch")
        with pytest.raises(InvalidRequest, match="purpose"):
            await jobs.create(ask(batch), CALLER)
        job = await jobs.create(ask(await upload(world, supervised(1))), CALLER)
        with pytest.raises(NotFound):
            await jobs.find(job.job_id, "somebody else")
        assert await jobs.listed("somebody else", None, 10) == []
        assert [j.job_id for j in await jobs.listed(TENANT, None, 10)] == [job.job_id]


async def test_pause_commits_and_resume_goes_on(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=0.05)) as (world, jobs):
        training = await upload(world, supervised(16))
        job = await jobs.create(ask(training), CALLER)
        await until(lambda: len(world.engine.steps) >= 2)
        job = await jobs.pause(job.job_id, TENANT)
        assert job.status is JobStatus.PAUSED and 2 <= job.step < job.total_steps
        assert job.step == len(world.engine.steps)  # no update is lost and none is repeated
        with pytest.raises(Conflict, match="paused"):
            await jobs.pause(job.job_id, TENANT)
        world.engine.step_s = 0.0
        await jobs.resume(job.job_id, TENANT)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED
        assert len(world.engine.steps) == job.total_steps
        with pytest.raises(Conflict, match="succeeded"):
            await jobs.cancel(job.job_id, TENANT)


async def test_cancel_ends_the_work(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=0.05)) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(16))), CALLER)
        await until(lambda: len(world.engine.steps) >= 1)
        job = await jobs.cancel(job.job_id, TENANT)
        assert job.status is JobStatus.CANCELLED and job.finished_s is not None
        steps = len(world.engine.steps)
        await asyncio.sleep(0.2)
        assert len(world.engine.steps) == steps
        assert f"job/{job.job_id}" not in world.engine.trainers


async def test_engine_death_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=0.01)) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(24))), CALLER)
        await until(lambda: len(world.engine.steps) >= 14)
        world.engine.die()
        await asyncio.sleep(0.1)
        await world.engine.start()
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert 24 < len(world.engine.steps) <= 24 + 10


@pytest.mark.parametrize(
    "point", ["job step", "job before rename", "job after rename", "job after commit"]
)
async def test_a_restart_goes_on_from_the_last_commit(tmp_path: Path, point: str) -> None:
    """What a killed process leaves is what is on disk; the next server goes on with that."""
    reached: dict[str, int] = {}

    def at(here: str) -> None:
        reached[here] = reached.get(here, 0) + 1
        if here == point and reached[here] == (15 if point == "job step" else 2):
            raise Crash

    engine = FakeEngine()
    store = Store.open(tmp_path)
    made = join(engine, store, tmp_path)
    models = Models(engine, "demo", 0)
    tools = JobTools(made.tools, made.learner, tmp_path, models.announce, at=at)
    jobs = Jobs(tools, models)
    job = await jobs.create(ask(await upload(made, supervised(24))), CALLER)
    await until(lambda: f"job/{job.job_id}" in engine.closed)
    job = await jobs.find(job.job_id, TENANT)
    assert job.status is JobStatus.RUNNING
    committed = job.step
    store.close()

    fresh = FakeEngine()
    async with jobs_over(tmp_path, fresh) as (_, again):
        job = await ended(again, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert committed in (10, 12, 20)
        assert len(fresh.steps) == job.total_steps - committed
        assert job.step == job.total_steps == 24


async def test_a_job_whose_adapter_is_gone_does_not_begin_at_the_base(tmp_path: Path) -> None:
    """It was loaded over HTTP, and unloaded while the job waited for its turn."""
    hand = tmp_path / "hand"
    hand.mkdir()
    (hand / "adapter_config.json").write_text("{}")
    (hand / "adapter_model.safetensors").write_text("by hand")
    loaded = AdapterVersion("formal", 1, inspect_adapter(hand).content_hash, str(hand))
    engine = FakeEngine(adapters={"formal": loaded}, step_s=0.2)
    async with jobs_over(tmp_path, engine) as (world, jobs):
        file = await upload(world, supervised(24))
        others = [await jobs.create(ask(file), CALLER) for _ in range(2)]
        await until(lambda: len(engine.trainers) == 2)
        job = await jobs.create(ask(file, model="demo:formal"), CALLER)
        del engine.adapters["formal"]
        for other in others:
            await jobs.cancel(other.job_id, TENANT)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.FAILED and job.error["code"] == "adapter_gone"
        assert await world.store.read(adapters.versions, "formal") == []


@pytest.mark.parametrize("change", ["", "changed"])
async def test_a_job_continues_what_was_loaded_by_hand(tmp_path: Path, change: str) -> None:
    hand = tmp_path / "hand"
    hand.mkdir()
    (hand / "adapter_config.json").write_text("{}")
    (hand / "adapter_model.safetensors").write_text("by hand")
    loaded = AdapterVersion("formal", 1, inspect_adapter(hand).content_hash, str(hand))
    engine, opened = FakeEngine(adapters={"formal": loaded}), []

    def judge(step: TrainingStep) -> None:
        opened.append(engine.spec_of[step.trainer].source)

    engine.judge = judge
    (hand / "adapter_model.safetensors").write_text(change or "by hand")
    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await jobs.create(
            ask(await upload(world, supervised(2)), model="demo:formal"), CALLER
        )
        job = await ended(jobs, job.job_id)
        versions = await world.store.read(adapters.versions, "formal")
        if change:  # it does not begin at the base instead
            assert job.status is JobStatus.FAILED and "have changed" in job.error["message"]
            assert versions == [] and opened == []
            return
        assert [(v.number, v.parent, v.origin) for v in versions] == [
            (1, 0, "import"),
            (2, 1, job.job_id),
        ]
        assert versions[0].content_hash == loaded.content_hash
        assert set(opened) == {versions[0].path}
        assert engine.adapters["formal"].label == "formal@2"


async def test_the_schedule_reaches_the_trainer(tmp_path: Path) -> None:
    given = {
        "n_epochs": 2,
        "batch_size": 2,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "weight_decay": 0.01,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-4,
    }
    async with jobs_over(tmp_path, FakeEngine(step_s=0.05)) as (world, jobs):
        job = await jobs.create(
            ask(await upload(world, supervised(6)), hyperparameters=given), CALLER
        )
        await until(lambda: bool(world.engine.steps))
        spec = world.engine.spec_of[f"job/{job.job_id}"]
        assert spec.optimizer == OptimizerSpec(
            learning_rate=1e-4,
            weight_decay=0.01,
            max_grad_norm=0.5,
            schedule=Schedule.LINEAR,
            warmup_steps=2,
            total_steps=6,
        )
        assert spec.own_schedule
        world.engine.step_s = 0.0
        assert (await ended(jobs, job.job_id)).status is JobStatus.SUCCEEDED
        given["warmup_steps"] = 6
        job = await jobs.create(ask(job.training_file, hyperparameters=given), CALLER)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.FAILED and "has 6 steps" in job.error["message"]


async def test_diverging_jobs_fail(tmp_path: Path) -> None:
    def judge(step: TrainingStep) -> str | None:
        return "the loss is not finite"

    async with jobs_over(tmp_path, FakeEngine(judge=judge)) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(24))), CALLER)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.FAILED and "not finite" in job.error["message"]


async def test_a_job_that_learns_nothing_fails(tmp_path: Path) -> None:
    """Also one with fewer steps than may fail in a row."""
    engine = FakeEngine(judge=lambda step: "the loss is not finite")
    async with jobs_over(tmp_path, engine) as (world, jobs):
        wanted = ask(await upload(world, supervised(8)), hyperparameters={"n_epochs": 1})
        job = await ended(jobs, (await jobs.create(wanted, CALLER)).job_id)
        assert job.status is JobStatus.FAILED and "no step" in job.error["message"]
        assert job.adapter not in engine.adapters


async def test_a_job_continues_an_adapter(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        first = await jobs.create(ask(await upload(world, supervised(2))), CALLER)
        first = await ended(jobs, first.job_id)
        second = await jobs.create(
            ask(await upload(world, supervised(2)), model=f"demo:{first.adapter}"), CALLER
        )
        second = await ended(jobs, second.job_id)
        assert second.adapter == first.adapter
        assert world.engine.adapters[first.adapter].number == 2
        version = await world.store.read(adapters.version, first.adapter, 2)
        assert version is not None and version.parent == 1
        told = await world.store.read(events.listed, first.adapter)
        assert second.job_id in told[0].message
