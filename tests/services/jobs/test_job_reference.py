"""Which model a job's preferences and labels are measured against."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_jobs
from test_jobs import CALLER, TENANT, ask, ended, jobs_over, preferences, supervised, upload

from fake_engine import FakeEngine
from fake_scores import score_of
from learning_world import World, join
from patience import until
from tandem.core.errors import Conflict, InvalidRequest
from tandem.core.learning import JobRecord, JobStatus
from tandem.core.training import Role
from tandem.services.answering.models import Models
from tandem.services.jobs import service
from tandem.services.jobs.service import Jobs
from tandem.services.learning.settings import LearningSettings
from tandem.services.versions.adapters import Adapters
from tandem.services.versions.service import Versions
from tandem.store import adapters

LABELLED: list[dict[str, object]] = [
    {"prompt": f"Number {n}?", "completion": f"It is {n}.", "label": n != 1} for n in range(4)
]


async def made(world: World, jobs: Jobs, model: str = "demo") -> str:
    # Other examples than those of the job: what is scored once is kept under the content.
    wanted = ask(await upload(world, supervised(9)[7:]), model=model)
    job = await ended(jobs, (await jobs.create(wanted, CALLER)).job_id)
    assert job.status is JobStatus.SUCCEEDED, job.error
    return job.adapter


async def create(world: World, jobs: Jobs, model: str, kind: str, **given: object) -> JobRecord:
    file_id = await upload(world, preferences(4) if kind == "dpo" else LABELLED)
    method: dict[str, Any] = {"type": kind, kind: {"hyperparameters": given}}
    return await jobs.create(ask(file_id, model=model, method=method, hyperparameters=None), CALLER)


def referred(engine: FakeEngine, job: JobRecord, under: str | None) -> bool:
    """Whether every example of the job's steps was measured under that label."""
    sequences = [
        sequence
        for step in engine.steps
        if step.trainer == f"job/{job.job_id}"
        for batch in step.micro_batches
        for sequence in batch
    ]
    assert sequences and not any(sequence.role is Role.TARGET for sequence in sequences)
    return all(s.reference == score_of(s.tokens, s.prompt_tokens, under) for s in sequences)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        ("", "", 0),
        ("", "version:1", 1),
        ("version:1", "", 1),
        ("version:1", "base", 0),
        ("version:1", "version:2", 2),
    ],
)
async def test_a_job_refers_to_what_it_or_its_adapter_says(
    tmp_path: Path, kind: str, own: str, given: str, expected: int
) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        await made(world, jobs, f"demo:{name}")
        if own:
            await world.store.write(adapters.set_settings, name, {"reference": own})
        told = {"reference": given} if given else {}
        job = await create(world, jobs, f"demo:{name}", kind, **told)
        shown = f"version:{expected}" if expected else "base"
        assert job.method[kind]["hyperparameters"]["reference"] == shown
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        label = f"~reference-of/{job.job_id}@{expected}" if expected else None
        assert referred(world.engine, job, label)
        await until(lambda: not any("reference" in loaded for loaded in world.engine.adapters))


async def test_a_new_adapter_has_the_base_whatever_the_servers_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = LearningSettings(reference="version:1")
    monkeypatch.setattr(test_jobs, "join", partial(join, settings=defaults))
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        job = await create(world, jobs, "demo", "dpo")
        assert job.method["dpo"]["hyperparameters"]["reference"] == "base"
        with pytest.raises(InvalidRequest, match="has no version 1") as refused:
            await create(world, jobs, "demo", "dpo", reference="version:1")
        assert refused.value.param == "reference"


async def test_a_job_keeps_what_the_settings_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with jobs_over(tmp_path, FakeEngine(step_s=0.02)) as (world, jobs):
        job = await create(world, jobs, "demo", "dpo", n_epochs=20)
        await until(lambda: bool(world.engine.steps))
        [before] = world.engine.spec_of.values()
        loss = world.engine.steps[0].loss
    assert job.method["dpo"]["hyperparameters"]["learning_rate"] == before.optimizer.learning_rate
    changed = LearningSettings(learning_rate=0.5, beta=0.9, weight_decay=0.9, max_grad_norm=9.0)
    monkeypatch.setattr(test_jobs, "join", partial(join, settings=changed))
    async with jobs_over(tmp_path, FakeEngine(step_s=0.02)) as (world, jobs):
        await until(lambda: bool(world.engine.steps))
        [again] = world.engine.spec_of.values()
        assert again.optimizer == before.optimizer and world.engine.steps[0].loss == loss
        world.engine.step_s = 0.0
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error


async def test_a_job_keeps_its_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the adapter's settings, its versions and the references of learning."""
    monkeypatch.setattr(service, "_PAUSE_S", 0.05)
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        name = await made(world, jobs)
        await made(world, jobs, f"demo:{name}")
        world.engine.most_steps = len(world.engine.steps) + 2
        job = await create(world, jobs, f"demo:{name}", "dpo", reference="version:1", n_epochs=9)
        await until(lambda: len(world.engine.steps) == world.engine.most_steps)
        models = Models(world.engine, "demo", 0)
        versions = Versions(world.tools, world.learner, models, Adapters(world.engine, (), {}))
        await versions.create(name, {"reference": "base"})  # also gives up learning
        with pytest.raises(Conflict, match=f"reference of {job.job_id}"):
            await versions.delete_version(name, 1)
        await jobs.pause(job.job_id, TENANT)
        world.engine.most_steps = math.inf
        await jobs.resume(job.job_id, TENANT)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert referred(world.engine, job, f"~reference-of/{job.job_id}@1")
        await versions.delete_version(name, 1)
