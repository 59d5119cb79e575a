"""Requests with a grammar wait beside the iterations while it is compiled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from fake_executor import FakeExecutor
from patience import PATIENCE_S
from tandem.build import join_loop
from tandem.config import Settings
from tandem.core.clock import MonotonicClock
from tandem.core.errors import InvalidRequest
from tandem.core.ports import EndDraws
from tandem.core.request import Request
from tandem.core.sampling import Grammar, GrammarKind, SamplingParams
from tandem.engine.client import AsyncEngineClient
from tandem.engine.loop import EngineLoop
from tandem.engine.thread import ThreadTransport

GRAMMAR = Grammar(GrammarKind.REGEX, "a", "response_format")


class Slow(FakeExecutor):
    """Compiles as long as `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = threading.Event(), threading.Event()
        self.texts: list[str] = []

    def compile_grammar(self, grammar: Grammar) -> EndDraws:
        self.texts.append(grammar.text)
        self.begun.set()
        assert self.gate.wait(PATIENCE_S)
        return super().compile_grammar(grammar)


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[AsyncEngineClient, Slow, EngineLoop]]:
    executor = Slow()
    loop = join_loop(Settings(), executor, clock=MonotonicClock(), check_every_step=True)
    client = AsyncEngineClient(ThreadTransport(lambda progress: loop))
    await client.start()
    try:
        yield client, executor, loop
    finally:
        executor.gate.set()
        await client.close()


async def collect(client: AsyncEngineClient, request: Request) -> list[int]:
    return [token async for event in client.generate(request) for token in event.tokens]


def asked(name: str, grammar: Grammar | None = GRAMMAR) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(max_tokens=4, grammar=grammar))


async def test_others_decode_on_while_a_grammar_is_compiled():
    async with engine() as (client, executor, _):
        waiting = asyncio.create_task(collect(client, asked("constrained")))
        await asyncio.to_thread(executor.begun.wait, PATIENCE_S)
        plain = await collect(client, asked("plain", None))
        assert plain and not waiting.done()
        executor.gate.set()
        assert await waiting == plain  # the fake follows no grammar


async def test_a_grammar_that_is_refused_reaches_no_scheduler():
    async with engine() as (client, executor, loop):
        executor.wrong_grammars.add(GRAMMAR)
        executor.gate.set()
        with pytest.raises(InvalidRequest, match="the grammar is wrong") as refused:
            await collect(client, asked("wrong"))
        assert refused.value.param == "response_format"
        assert not loop.scheduler.is_active("wrong") and loop.stats().iterations == 0


async def test_a_compiled_grammar_is_held_until_its_request_has_ended():
    async with engine() as (client, executor, loop):
        pace_s = [0.02]
        loop.on_plan = lambda plan, result: time.sleep(pace_s[0])
        executor.gate.set()
        long = replace(asked("long"), sampling=SamplingParams(max_tokens=99, grammar=GRAMMAR), n=2)
        running = asyncio.create_task(collect(client, long))
        await asyncio.to_thread(executor.begun.wait, PATIENCE_S)
        assert await collect(client, asked("short"))
        assert await collect(client, asked("plain", None))
        [held] = executor.ready_grammars
        assert not running.done() and held.ended == []
        pace_s[0] = 0.0
        assert await running
        await client.stats()  # the loop has gone on
        assert sorted(held.ended) == [0, 1]
        del held
        assert not executor.ready_grammars


async def test_a_request_that_is_given_up_while_it_waits_never_runs():
    async with engine() as (client, executor, loop):
        waiting = asyncio.create_task(collect(client, asked("gone")))
        await asyncio.to_thread(executor.begun.wait, PATIENCE_S)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        executor.gate.set()
        assert await collect(client, asked("after"))
        assert loop.stats().prompt_tokens == 3


async def test_a_grammar_whose_client_has_left_is_not_compiled():
    """Clients that send slow grammars and leave would make a queue for all others."""
    async with engine() as (client, executor, _):
        first = asyncio.create_task(collect(client, asked("first")))
        await asyncio.to_thread(executor.begun.wait, PATIENCE_S)
        left = asyncio.create_task(collect(client, asked("left", replace(GRAMMAR, text="b"))))
        last = asyncio.create_task(collect(client, asked("last", replace(GRAMMAR, text="c"))))
        await asyncio.sleep(0)
        await client.stats()  # what was sent before it has been handled
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await client.stats()
        executor.gate.set()
        await asyncio.gather(first, last)
        assert executor.texts == ["a", "c"]
