"""A job whose trainer finds no memory waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_jobs import CALLER, TENANT, ask, ended, jobs_over, supervised, upload

from learning_world import OneTrainer
from tandem.core.learning import JobStatus
from tandem.core.training import TrainerState
from tandem.services.jobs import run


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

        async with asyncio.timeout(20):
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
