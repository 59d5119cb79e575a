"""Trainers, steps, scores and versions through the client, over a host in a process of its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from learning_bench import request, sft_step
from test_process import collect, engine, expected, holding, kill, long_request

from fake_answers import expected_score
from fake_executor import FakeExecutor
from patience import until
from tandem.build import join_loop
from tandem.config import SchedulingConfig, Settings
from tandem.core.errors import (
    AdapterError,
    EngineDead,
    InvalidRequest,
    NoMemory,
    NotFound,
    TandemError,
    TrainingCancelled,
)
from tandem.core.plan import NO_MEMORY
from tandem.core.ports import EngineClient, EngineState
from tandem.core.training import LoraSpec, ScoreRequest, TrainerSpec
from tandem.core.version import AdapterVersion
from tandem.engine.client import AsyncEngineClient
from tandem.engine.thread import ThreadTransport


def as_client(client: AsyncEngineClient) -> EngineClient:
    """A type checker compares the two here."""
    return client


@asynccontextmanager
async def in_thread(
    policy: str = "unified", executor: FakeExecutor | None = None, **options: str
) -> AsyncIterator[AsyncEngineClient]:
    scheduling = SchedulingConfig(policy=policy, policy_options=options)
    settings = Settings(scheduling=scheduling)
    client = AsyncEngineClient(
        ThreadTransport(lambda progress: join_loop(settings, executor or FakeExecutor(200)))
    )
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def outcomes(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_steps_of_several_trainers_beside_requests():
    async with engine(step_s=0.001) as (client, _):
        asked = [long_request(f"r{i}", 60) for i in range(4)]
        answers = [asyncio.create_task(collect(client, each)) for each in asked]
        for name in ("t", "u"):
            state = await client.open_trainer(TrainerSpec(name))
            assert (state.name, state.revision) == (name, 0)
        found = await asyncio.gather(
            *(
                client.train(sft_step(f"{name}{i}", name, [9, 12]))
                for i in range(3)
                for name in "tu"
            )
        )
        assert [(o.step_id, o.revision) for o in found] == [
            (f"{name}{i}", i + 1) for i in range(3) for name in "tu"
        ]
        assert all(outcome.applied and outcome.loss > 0 for outcome in found)
        assert await asyncio.gather(*answers) == [expected(each) for each in asked]
        stats = await client.stats()
        assert stats.training_steps == 6 and stats.training_tokens == 6 * 19
        assert stats.running == 0 and stats.kv_blocks_used == 0


async def test_scores_and_their_refusals():
    async with engine() as (client, _):
        score = await client.score(ScoreRequest("x", (1, 2, 3, 4), 2))
        assert score.logprob == pytest.approx(expected_score((1, 2, 3, 4), 2, None))
        assert (score.tokens, score.adapter) == (2, None)
        for bad in (
            ScoreRequest("y", (1, 2, 3), 1, adapter="none"),
            ScoreRequest("y", (1, 2, 3), 1, trainer="none"),
        ):
            with pytest.raises(NotFound):
                await client.score(bad)
        with pytest.raises(InvalidRequest, match="completion"):
            await client.score(ScoreRequest("y", (1, 2, 3), 3))
        with pytest.raises(NotFound, match="open it first"):
            await client.train(sft_step("s", "none", [9]))


async def test_a_score_for_which_there_is_no_memory_says_so():
    executor = FakeExecutor(200)
    executor.failing, executor.fails_for = {0, 1}, NO_MEMORY
    async with in_thread(executor=executor) as client:
        with pytest.raises(NoMemory, match="short of memory"):
            await client.score(ScoreRequest("x", (1, 2, 3, 4), 2))
        executor.failing = set()
        assert math.isfinite((await client.score(ScoreRequest("y", (1, 2, 3, 4), 2))).logprob)


async def test_failures_come_back_as_outcomes_with_nan():
    async with engine(fail=[0]) as (client, _):
        await client.open_trainer(TrainerSpec("t"))
        outcome = await client.train(sft_step("s", "t", [9]))
        assert not outcome.applied and outcome.problem == "asked to fail"
        assert math.isnan(outcome.loss) and outcome.revision == 0
        again = await client.train(sft_step("again", "t", [9]))
        assert again.applied and again.revision == 1


async def test_cancelling_steps_and_closing_trainers():
    async with in_thread("no_retrain") as client:
        for name in "tu":
            await client.open_trainer(TrainerSpec(name))
        calls = [
            asyncio.create_task(client.train(sft_step(f"{name}{i}", name, [9])))
            for i in range(2)
            for name in "tu"
        ]
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls), "no_retrain does not train"
        await client.cancel_steps("t")
        await client.close_trainer("u")
        assert all(isinstance(error, TrainingCancelled) for error in await outcomes(*calls))
        await client.cancel_steps("t")
        await client.close_trainer("u")
        with pytest.raises(NotFound):
            await client.train(sft_step("s", "u", [9]))
        assert (await client.stats()).training_waiting == 0


async def test_opening_again_cancels_and_a_closed_trainer_fails_its_scores(tmp_path):
    async with in_thread("ekya", interval_s="1000") as client:
        await client.open_trainer(TrainerSpec("t"))
        call = asyncio.create_task(client.train(sft_step("s", "t", [9])))
        await asyncio.sleep(0.02)
        await client.open_trainer(TrainerSpec("t"))
        with pytest.raises(TrainingCancelled):
            await call
    hold = tmp_path / "hold"
    async with engine(step_s=0.05, hold_step=str(hold)) as (client, _):
        await client.open_trainer(TrainerSpec("t"))
        long = tuple(place % 40 for place in range(390))
        with holding(hold):
            calls = [
                asyncio.create_task(client.score(ScoreRequest(f"x{i}", long, 1, trainer="t")))
                for i in range(12)
            ]
            await asyncio.sleep(0)
            closing = asyncio.create_task(client.close_trainer("t"))
            await asyncio.sleep(0)
        await closing
        errors = [e for e in await outcomes(*calls) if isinstance(e, TandemError)]
        assert errors and all("was closed" in str(error) for error in errors)


async def test_a_score_that_nobody_waits_for_any_more_is_given_up(tmp_path):
    hold = tmp_path / "hold"
    async with engine(step_s=0.05, hold_step=str(hold)) as (client, _):
        long = tuple(place % 40 for place in range(390))
        with holding(hold):
            calls = [
                asyncio.create_task(client.score(ScoreRequest(f"x{i}", long, 1))) for i in (1, 2)
            ]
            await asyncio.sleep(0)
            calls[0].cancel()
            await asyncio.sleep(0)
        first, second = await outcomes(*calls)
        assert isinstance(first, asyncio.CancelledError) and second.tokens == 389
        assert (await client.stats()).kv_blocks_used == 0


async def test_staged_versions_are_published_and_pinned(tmp_path):
    async with engine(step_s=0.002) as (client, _):
        await client.open_trainer(TrainerSpec("t", LoraSpec(seed=5)))
        first = await client.stage("t", "candidate", str(tmp_path / "1"))
        published = await client.publish_adapter(
            AdapterVersion("formal", 4, first.content_hash, first.path)
        )
        assert client.adapters == {"candidate": first, "formal": published}
        stream = client.generate(long_request("old", 200, adapter="formal"))
        seen = {(await anext(stream)).adapter}
        await client.train(sft_step("s", "t", [9]))
        second = await client.stage("t", "candidate", str(tmp_path / "2"))
        assert second.number == 2 and second.content_hash != first.content_hash
        await client.publish_adapter(AdapterVersion("formal", 5, second.content_hash, second.path))
        seen |= {event.adapter async for event in stream}
        assert seen == {"formal@4"}, "a running request keeps its version"
        event = [e async for e in client.generate(long_request("new", 2, adapter="formal"))][-1]
        assert event.adapter == "formal@5"
        score = await client.score(ScoreRequest("x", (1, 2, 3), 1, adapter="candidate"))
        assert score.adapter == "candidate@2"
        assert score.logprob == pytest.approx(expected_score((1, 2, 3), 1, second.content_hash))
        with pytest.raises(AdapterError, match="cannot write"):
            await client.stage("t", "candidate", str(tmp_path / "2"))
        with pytest.raises(TandemError):
            await client.stage("none", "candidate", str(tmp_path / "3"))
        again = await client.open_trainer(TrainerSpec("again", source=second.path, resume=True))
        assert again.revision == 1


async def test_the_loop_does_not_wait_for_the_disk(tmp_path):
    hold = tmp_path / "hold"
    async with engine(hold_write=str(hold)) as (client, _):
        await client.open_trainer(TrainerSpec("t"))
        with holding(hold):
            staging = asyncio.create_task(client.stage("t", "candidate", str(tmp_path / "v")))
            await asyncio.sleep(0)
            asked = long_request("r", 50)
            assert await collect(client, asked) == expected(asked)
            outcome = await client.train(sft_step("s", "t", [9]))
            assert outcome.applied and not staging.done()
        assert (await staging).label == "candidate@1"


async def test_death_ends_every_call_and_versions_come_back(tmp_path):
    hold = tmp_path / "hold"
    async with engine(hold_step=str(hold)) as (client, transport):
        await client.open_trainer(TrainerSpec("t"))
        staged = await client.stage("t", "candidate", str(tmp_path / "1"))
        version = AdapterVersion("formal", 9, staged.content_hash, staged.path)
        await client.publish_adapter(version)
        with holding(hold):
            pending = [
                asyncio.create_task(client.train(sft_step("s", "t", *[[20]] * 20))),
                asyncio.create_task(client.score(ScoreRequest("x", tuple(range(40)) * 9, 1))),
            ]
            await asyncio.sleep(0.1)
            await kill(client, transport)
        assert all(isinstance(error, EngineDead) for error in await outcomes(*pending))
        with pytest.raises(EngineDead):
            await client.open_trainer(TrainerSpec("t"))
        await until(lambda: client.state is EngineState.READY)
        asked = request("r", (1, 2), 3, adapter="formal")
        assert [e async for e in client.generate(asked)][-1].adapter == "formal@9"
        assert client.adapters == {"candidate": staged, "formal": version}
        # Not an error of the step: whoever learns opens the trainer again and goes on.
        for call in (
            client.train(sft_step("s", "t", [9])),
            client.score(ScoreRequest("x", (1, 2, 3), 1, trainer="t")),
            client.stage("t", "candidate", str(tmp_path / "2")),
        ):
            with pytest.raises(EngineDead, match="open it again"):
                await call
        await client.open_trainer(TrainerSpec("t"))
        assert (await client.train(sft_step("s", "t", [9]))).revision == 1
        await client.close_trainer("t")
        with pytest.raises(NotFound, match="open it first"):
            await client.train(sft_step("s", "t", [9]))


async def test_an_idle_engine_does_not_spin():
    """Steps that the policy never runs cost no processor time."""
    async with engine(policy="no_retrain") as (client, transport):
        await client.open_trainer(TrainerSpec("t"))
        call = asyncio.create_task(client.train(sft_step("s", "t", [9])))
        await asyncio.sleep(0.3)
        child = psutil.Process(transport.pid)
        before = child.cpu_times().user
        await asyncio.sleep(1.0)
        assert child.cpu_times().user - before < 0.3
        call.cancel()
