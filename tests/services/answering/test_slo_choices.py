"""Every choice that was asked for is counted once, by its objectives or by why it met none."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from test_service_generation import HELLO, TURNS, Stage, collect, options

from fake_engine import Script
from tandem.core.errors import EngineDead, InvalidRequest, Overloaded
from tandem.core.request import Request
from tandem.core.sequence import FinishReason
from tandem.core.slo import Objectives, Slo
from tandem.services.answering.answer import GenerationFailed

SLO = Slo(1.0, 0.1)


def counted(stage: Stage) -> dict[str, float]:
    """Choices by `met`, those that were counted at all."""
    return {
        sample.labels["met"]: sample.value
        for family in stage.service._tools.metrics.slo.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    }


def staged(**more: object) -> Stage:
    return Stage(objectives=Objectives(SLO), **more)  # type: ignore[arg-type]


STOPPED = options(stops=("how",))


@pytest.mark.parametrize(
    ("before_s", "between_s", "met"),
    [(0.5, 0.05, "both"), (1.5, 0.05, "tpot"), (0.5, 0.2, "ttft"), (1.5, 0.2, "neither")],
)
async def test_what_a_stop_string_ended_is_judged_too(before_s, between_s, met) -> None:
    stage = staged()
    answer = await stage.service.chat(TURNS, STOPPED)
    stage.clock.advance(before_s)
    reasons: list[FinishReason | None] = []
    async for delta in answer.deltas():
        reasons.append(delta.finish_reason)
        stage.clock.advance(between_s)
    assert reasons[-1] is FinishReason.STOP and stage.engine.aborted
    assert counted(stage) == {met: 1}


async def test_the_time_before_the_engine_counts() -> None:
    """A prompt that takes long to encode is late for its client."""
    stage = staged()
    encode = stage.service.encode_chat

    async def slow(turns: object, **how: bool) -> tuple[int, ...]:
        stage.clock.advance(1.5)
        return await encode(turns, **how)  # type: ignore[arg-type]

    stage.clock.advance(5.0)
    stage.service.encode_chat = slow  # type: ignore[method-assign, assignment]
    await collect(await stage.service.chat(TURNS, STOPPED))
    assert counted(stage) == {"tpot": 1}
    assert stage.engine.requests[0].arrival_s == 5.0


async def test_refused_choices_count_as_shed() -> None:
    stage = staged(play=lambda request, index: Script(HELLO, delay_s=0.05), max_waiting=1)
    first = asyncio.create_task(collect(await stage.service.chat(TURNS, options())))
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        await collect(await stage.service.complete(["a", "b"], options(n=3)))
    assert counted(stage) == {"shed": 6}
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert counted(stage) == {"shed": 6, "left": 1}


def dies(request: Request, index: int) -> Script:
    return Script(HELLO, dies_after=2)


def gives_up(request: Request, index: int) -> Script:
    """Choice 0 ends well, choice 1 does not."""
    if index == 0:
        return Script(())
    return Script(HELLO, FinishReason.ERROR, stop_token=None, error="no room")


@pytest.mark.parametrize(
    ("play", "error", "counts"),
    [
        (dies, EngineDead, {"failed": 2}),
        (gives_up, GenerationFailed, {"both": 1, "failed": 1}),
    ],
)
async def test_what_the_server_gives_up_counts_as_failed(play, error, counts) -> None:
    stage = staged(play=play)
    with pytest.raises(error):
        await collect(await stage.service.chat(TURNS, options(n=2)))
    assert counted(stage) == counts


async def test_a_dead_engine_fails_what_comes_and_a_bad_request_does_not() -> None:
    dead, bad = EngineDead("it restarts"), InvalidRequest("no such thing")
    for refusal, counts in ((dead, {"failed": 1}), (bad, {"left": 1})):
        stage = staged()
        stage.engine.refuse = refusal
        with pytest.raises(type(refusal)):
            await collect(await stage.service.chat(TURNS, options()))
        assert counted(stage) == counts


async def test_a_client_that_goes_away_leaves_its_choices_apart() -> None:
    stage = staged()
    answer = await stage.service.chat(TURNS, options(n=2))
    async with aclosing(answer.deltas()) as deltas:
        await anext(deltas)
    assert counted(stage) == {"left": 2}
