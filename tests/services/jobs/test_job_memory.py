"""A job waits: for memory of its trainer, and for a disk that does not take its adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_jobs import CALLER, TENANT, ask, ended, jobs_over, preferences, supervised, upload

from fake_engine import FakeEngine
from fake_scores import score_of
from learning_world import OneTrainer
from patience import PATIENCE_S
from tandem.adapters.files import inspect_adapter
from tandem.core.errors import NoMemory
from tandem.core.learning import JobStatus
from tandem.core.plan import NO_MEMORY
from tandem.core.training import ScoreRequest, TrainerState
from tandem.core.version import AdapterVersion
from tandem.services import tasks
from tandem.services.jobs import run
from tandem.services.learning import loaded
from tandem.services.learning.conclude import Concluder


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.02)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_job_waits_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    monkeypatch.setattr(run, "_LOOK_FOR_ROOM_S", 0.05)
    engine = OneTrainer(step_s=0.01)
    engine.trainers["another"] = TrainerState("another", 0, 1000)
    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(4))), CALLER)
        job_id = job.job_id

        async def waits() -> bool:
            told = [event.message for event in await jobs.events(job_id, TENANT, None, 100)]
            return sum("The job waits" in line for line in told) == 1

        async with asyncio.timeout(PATIENCE_S):
            while not await waits():
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        assert await waits()  # said once
        if paused:
            assert (await jobs.pause(job_id, TENANT)).status is JobStatus.PAUSED
            await jobs.resume(job_id, TENANT)
        await engine.close_trainer("another")
        job = await ended(jobs, job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error


async def test_a_job_waits_for_memory_for_the_answers_of_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_LOOK_FOR_ROOM_S", 0.02)
    examine, short = Concluder.examine, [NoMemory(NO_MEMORY)] * 3

    async def short_at_first(*args: Any) -> Any:
        if short:
            raise short.pop()
        return await examine(*args)

    monkeypatch.setattr(Concluder, "examine", short_at_first)
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(4))), CALLER)
        ending = await ended(jobs, job.job_id)
        assert ending.status is JobStatus.SUCCEEDED, ending.error
        told = [event.message for event in await jobs.events(job.job_id, TENANT, None, 100)]
        assert sum("The job waits" in line for line in told) == 1 and not short


async def test_a_passing_shortage_for_steps_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many steps in a row fail as end a job that is at fault itself."""
    monkeypatch.setattr(run, "_LOOK_FOR_ROOM_S", 0.02)
    short = [NO_MEMORY] * run._MOST_FAILURES
    engine = FakeEngine(judge=lambda step: short.pop() if short else None)
    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(24))), CALLER)
        ending = await ended(jobs, job.job_id)
        assert ending.status is JobStatus.SUCCEEDED, ending.error
        told = [event.message for event in await jobs.events(job.job_id, TENANT, None, 100)]
        assert sum("The job waits" in line for line in told) == 1 and not short
        assert len(engine.steps) == ending.total_steps  # none of them is left out


@pytest.mark.parametrize("under", ["the base model", "the trainer"])
async def test_a_passing_shortage_for_scores_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under: str
) -> None:
    """Those of the reference fail before steps, those of the trainer in the validation."""
    monkeypatch.setattr(run, "_LOOK_FOR_ROOM_S", 0.02)
    short = [NoMemory(NO_MEMORY)] * 5

    def score_as(request: ScoreRequest, label: str | None) -> float:
        if short and (label is None) == (under == "the base model"):
            raise short.pop()
        return score_of(request.tokens, request.prompt_tokens, label)

    async with jobs_over(tmp_path, FakeEngine(score_as=score_as)) as (world, jobs):
        training, held = await upload(world, preferences(24)), await upload(world, preferences(3))
        wanted = ask(training, validation_file=held, method={"type": "dpo"}, hyperparameters=None)
        ending = await ended(jobs, (await jobs.create(wanted, CALLER)).job_id)
        assert ending.status is JobStatus.SUCCEEDED, ending.error
        assert not short


async def test_a_disk_that_does_not_take_what_was_loaded_delays_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.02)
    copies: list[Path] = []
    copy = loaded.copy

    def full_at_first(source: Path, target: Path) -> None:
        copies.append(target)
        if len(copies) < 3:
            raise OSError(28, "No space left on device")
        copy(source, target)

    monkeypatch.setattr(loaded, "copy", full_at_first)
    hand = tmp_path / "hand"
    hand.mkdir()
    (hand / "adapter_config.json").write_text("{}")
    (hand / "adapter_model.safetensors").write_text("by hand")
    engine = FakeEngine()
    content_hash = inspect_adapter(hand).content_hash
    engine.adapters["loaded"] = AdapterVersion("loaded", 1, content_hash, str(hand))
    async with jobs_over(tmp_path, engine) as (world, jobs):
        file = await upload(world, supervised(2))
        job = await jobs.create(ask(file, model="demo:loaded"), CALLER)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        assert len(copies) == 3
