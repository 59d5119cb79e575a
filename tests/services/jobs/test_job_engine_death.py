"""A job outlives its engine also where many calls are in flight at once: scores and the gate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import pytest
import test_jobs
from test_jobs import CALLER, ask, ended, jobs_over, preferences, supervised, upload

from fake_engine import FakeEngine
from learning_world import join, kill, note_waits
from patience import until
from tandem.core.events import TokenEvent
from tandem.core.learning import JobStatus
from tandem.core.request import Request
from tandem.core.training import Score, ScoreRequest
from tandem.core.version import INTERNAL


class Mortal(FakeEngine):
    """Dies once, with several calls of one kind in flight: references, gate scores or answers."""

    dies_at = ""

    async def score(self, request: ScoreRequest) -> Score:
        """As the fake does."""
        await self._death("gate" if (request.adapter or "").startswith(INTERNAL) else "references")
        return await super().score(request)

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """As the fake does."""
        await self._death("answers")
        async for event in super().generate(request):
            yield event

    async def _death(self, here: str) -> None:
        if here == self.dies_at:
            await asyncio.sleep(0.02)  # the others of the group come this far, too
            if self.dies_at:
                self.dies_at = ""
                self.die()


@pytest.mark.parametrize("at", ["references", "gate", "answers"])
async def test_a_job_outlives_its_engine(tmp_path: Path, at: str) -> None:
    engine = Mortal()
    engine.dies_at = at
    async with jobs_over(tmp_path, engine) as (world, jobs):
        dpo = at == "references"
        file_id = await upload(world, preferences(8) if dpo else supervised(8))
        changes = {"method": {"type": "dpo"}, "hyperparameters": None} if dpo else {}
        job = await jobs.create(ask(file_id, **changes), CALLER)
        await until(lambda: engine.dies_at == "")
        await asyncio.sleep(0.1)
        await engine.start()
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error


async def test_a_job_that_ends_the_engine_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less and less often until then."""
    waits, engine = note_waits(monkeypatch), FakeEngine()
    engine.judge = lambda step: kill(engine)
    async with jobs_over(tmp_path, engine) as (world, jobs):
        job = await jobs.create(ask(await upload(world, supervised(8))), CALLER)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.FAILED and "20 times" in job.error["message"]
        assert waits == [2.0**number for number in range(19)]


async def test_a_job_without_room_fails_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(test_jobs, "join", partial(join, max_adapters=1))
    async with jobs_over(tmp_path, engine) as (world, jobs):
        await engine.load_adapter("loaded", str(tmp_path))
        job = await jobs.create(ask(await upload(world, supervised(4))), CALLER)
        job = await ended(jobs, job.job_id)
        assert job.status is JobStatus.FAILED and "--max-adapters" in job.error["message"]
        assert engine.steps == []
