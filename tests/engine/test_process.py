"""Supervision: what clients see when the engine process dies, is replaced or cannot start."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import psutil
import pytest
import zmq

from fake_answers import STATE, expected_tokens
from fake_executor import FakeExecutor
from patience import PATIENCE_S, until
from tandem.build import join_loop
from tandem.config import Settings
from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import EngineDead, InvalidRequest, NotFound, UnsupportedModel
from tandem.core.lengths import Forecast
from tandem.core.plan import Draw
from tandem.core.ports import EngineState
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.engine import process
from tandem.engine.client import AsyncEngineClient
from tandem.engine.messages import Lost, Message, Ready
from tandem.engine.process import ProcessTransport
from tandem.engine.thread import ThreadTransport

CHILD = [sys.executable, str(Path(__file__).with_name("fake_child.py"))]


@asynccontextmanager
async def engine(
    silence_s: float = 10.0,
    stuck_s: float = 300.0,
    quiet_s: float = 1.5,
    clock: Clock | None = None,
    **behaviour: Any,
) -> AsyncIterator[tuple[AsyncEngineClient, ProcessTransport]]:
    settings = msgspec.msgpack.encode(behaviour)
    transport = ProcessTransport(
        CHILD,
        settings,
        clock or MonotonicClock(),
        quiet_s=quiet_s,
        silence_s=silence_s,
        stuck_s=stuck_s,
    )
    client = AsyncEngineClient(transport)
    try:
        await client.start()
        yield client, transport
    finally:
        await client.close()


def long_request(name: str, tokens: int = 300, **more: Any) -> Request:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, (1, 2, 3), sampling, **more)


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """An engine that was told of this path waits meanwhile, as `fake_child` says."""
    path.touch()
    try:
        yield
    finally:
        path.unlink()


async def kill(client: AsyncEngineClient, transport: ProcessTransport) -> None:
    """Kill the engine's process; its client knows it afterwards."""
    assert transport.pid is not None
    os.kill(transport.pid, signal.SIGKILL)
    await until(lambda: client.state in (EngineState.DEAD, EngineState.STARTING))


async def collect(client: AsyncEngineClient, request: Request) -> list[int]:
    return [token async for event in client.generate(request) for token in event.tokens]


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def expected(request: Request) -> list[int]:
    draw = Draw(0, 0, 0, request.sampling)
    return expected_tokens(request.prompt, draw, None, request.sampling.max_tokens, frozenset())


async def test_concurrent_requests_get_their_own_tokens():
    async with engine() as (client, _):
        asked = [
            Request(f"r{i}", (i, i + 1), SamplingParams(max_tokens=20, ignore_eos=True))
            for i in range(20)
        ]
        found = await asyncio.gather(*(collect(client, request) for request in asked))
        assert found == [expected(request) for request in asked]
        stats = await client.stats()
        assert stats.generation_tokens == 400 and stats.running == 0 and stats.recent == ()
        last = (await client.stats(2)).recent
        assert [each.number for each in last] == [stats.iterations - 1, stats.iterations]


async def test_kill_9_under_load():
    async with engine(step_s=0.05) as (client, transport):
        assert client.state is EngineState.READY
        requests = [asyncio.create_task(collect(client, long_request(f"r{i}"))) for i in range(8)]
        await asyncio.sleep(0.5)
        assert transport.pid is not None
        os.kill(transport.pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(outcome, EngineDead) for outcome in outcomes)
        assert client.state in (EngineState.DEAD, EngineState.STARTING)
        with pytest.raises(EngineDead):
            await collect(client, long_request("too soon"))
        with pytest.raises(EngineDead):
            await client.stats()
        await until(lambda: client.state is EngineState.READY)
        again = long_request("again", 3)
        assert await collect(client, again) == expected(again)


async def test_an_engine_of_which_nothing_can_be_heard_is_replaced():
    """Whoever takes its messages failed at one; it would be waited for without end."""
    fails, lost = [OSError(errno.ENOSPC, "No space left on device")], []
    ready = asyncio.Event()

    def deliver(message: Message) -> None:
        if isinstance(message, Ready):
            if fails:
                raise fails.pop()
            ready.set()
        if isinstance(message, Lost):
            lost.append(message.reason)

    transport = ProcessTransport(CHILD, msgspec.msgpack.encode({}), MonotonicClock())
    await transport.start(deliver)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await ready.wait()
    finally:
        await transport.close()
    assert len(lost) == 1 and "No space left" in lost[0]


async def test_a_restart_for_which_there_was_no_socket_is_tried_again(monkeypatch):
    async with engine() as (client, transport):
        opened, tries = process.ZmqClientChannel, []

        def full_at_first(*args):
            tries.append(args)
            if len(tries) == 1:
                raise zmq.ZMQError(errno.EMFILE)
            return opened(*args)

        monkeypatch.setattr(process, "ZmqClientChannel", full_at_first)
        await kill(client, transport)
        await until(lambda: client.state is EngineState.READY)
        assert len(tries) == 2


async def test_adapters_come_back_after_a_restart(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4}))
    weights = tmp_path / "adapter_model.safetensors"
    async with engine() as (client, transport):
        for content in (b"one", b"two"):
            weights.write_bytes(content)
            version = await client.load_adapter("formal", str(tmp_path))
        assert version.label == "formal@2"
        await kill(client, transport)
        await until(lambda: client.state is EngineState.READY)
        events = [e async for e in client.generate(long_request("r", 3, adapter="formal"))]
        assert events[-1].adapter == "formal@2"
        assert client.adapters == {"formal": version}


async def test_adapters_survive_two_deaths_and_report_what_changed(tmp_path):
    folders = {}
    for name in "abcd":
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "adapter_config.json").write_text(json.dumps({"r": 4}))
        (folders[name] / "adapter_model.safetensors").write_bytes(name.encode())
    async with engine() as (client, transport):
        for name, folder in folders.items():
            await client.load_adapter(name, str(folder))
        (folders["a"] / "adapter_model.safetensors").write_bytes(b"changed")
        for _ in range(2):
            await kill(client, transport)
            await until(lambda: client.state is EngineState.READY)
        for name in "bcd":
            events = [e async for e in client.generate(long_request(name, 3, adapter=name))]
            assert events[-1].adapter == f"{name}@1"
        assert set(client.adapters) == {"b", "c", "d"}, "other weights would answer as a@1"


async def test_a_bug_in_the_engine_ends_it_and_its_successor_serves():
    async with engine(bug_at_step=5) as (client, transport):
        first = transport.pid
        with pytest.raises(EngineDead):
            await collect(client, long_request("r"))
        assert client.state is not EngineState.READY
        await until(lambda: client.state is EngineState.READY and transport.pid != first)
        request = long_request("again", 3)
        assert await collect(client, request) == expected(request)


async def test_what_cannot_start_says_why_and_nothing_else(capfd):
    with pytest.raises(UnsupportedModel, match="no such model"):
        async with engine(broken=True):
            pass
    assert capfd.readouterr().err == ""


async def test_closing_the_stream_aborts():
    async with engine(step_s=0.05) as (client, _):
        stream = client.generate(long_request("r", n=3))
        await anext(stream)
        assert (await client.stats()).running == 3
        await stream.aclose()
        stats = await client.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


async def test_aborting_one_choice_leaves_the_others():
    async with engine(step_s=0.005) as (client, _):
        request = long_request("r", 40, n=2)
        found: dict[int, int] = {0: 0, 1: 0}
        async for event in client.generate(request):
            found[event.index] += len(event.tokens)
            if event.index == 1 and found[1] == 5:
                await client.abort("r", 1)
        assert found == {0: 40, 1: 5}


async def test_refusals_reach_the_caller():
    async with engine(max_model_len=20) as (client, _):
        with pytest.raises(InvalidRequest, match="context"):
            await collect(client, Request("r", tuple(range(30))))
        with pytest.raises(NotFound):
            await collect(client, long_request("s", adapter="none"))
        with pytest.raises(NotFound):
            await client.unload_adapter("none")


async def test_draining(tmp_path):
    hold = tmp_path / "hold"
    async with engine(hold_step=str(hold)) as (client, _):
        with holding(hold):
            request = asyncio.create_task(collect(client, long_request("r", 50)))
            await asyncio.sleep(0)
            assert not await client.drain(0.01)
        assert client.state is EngineState.DRAINING
        with pytest.raises(EngineDead, match="shutting down"):
            await collect(client, long_request("s"))
        assert await client.drain(PATIENCE_S)
        assert len(await request) == 50


async def test_a_close_that_is_cancelled_leaves_nothing_open():
    child = await close_twice()
    await until(lambda: not child.is_running())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        gc.collect()
    assert not [str(each.message) for each in seen]


async def close_twice() -> psutil.Process:
    """Close an engine and cancel that while it waits for the child's end."""
    transport = ProcessTransport(CHILD, msgspec.msgpack.encode({}), MonotonicClock())
    await transport.start(lambda message: None)
    await until(lambda: transport.pid is not None)
    child = psutil.Process(transport.pid)
    closing = asyncio.create_task(transport.close())
    for _ in range(3):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    return child


async def test_a_state_comes_with_the_first_token_and_a_forecast_goes_back():
    loop = join_loop(Settings(), FakeExecutor(200))
    client = AsyncEngineClient(ThreadTransport(lambda progress: loop))
    await client.start()
    try:
        states, longer = [], Forecast((200.0,) * 5, 300, "hidden")
        request = long_request("r", 30, wants_state=True)
        with patch.object(loop.scheduler, "foresee", wraps=loop.scheduler.foresee) as foresee:
            async with aclosing(client.generate(request)) as events:
                async for event in events:
                    states.append(event.state)
                    if event.state:
                        client.foresee("r", longer)
                        client.foresee("nobody", longer)
            await client.stats()  # what was sent before it has been handled
        assert states == [STATE, *[b""] * 29]
        foresee.assert_called_once_with("r", longer)
        assert [e.state async for e in client.generate(long_request("s", 2))] == [b""] * 2
    finally:
        await client.close()


async def test_the_same_host_in_a_thread():
    transport = ThreadTransport(lambda progress: join_loop(Settings(), FakeExecutor(200)))
    client = AsyncEngineClient(transport)
    await client.start()
    try:
        request = long_request("r", 30)
        assert await collect(client, request) == expected(request)
    finally:
        await client.close()
