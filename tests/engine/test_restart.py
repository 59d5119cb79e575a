"""What an engine that died leaves to its successor: nothing that runs, and what is to answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
from test_process import CHILD, collect, engine, holding, kill, lives, long_request

from fake_engine import INFO
from patience import PATIENCE_S, eventually, until
from tandem.adapters.files import inspect_adapter
from tandem.core.clock import MonotonicClock
from tandem.core.errors import (
    AdapterError,
    EngineDead,
    NoMemory,
    NotFound,
    OutOfMemory,
    TrainingCancelled,
)
from tandem.core.plan import NO_MEMORY
from tandem.core.ports import EngineState
from tandem.core.training import TrainerSpec
from tandem.core.version import INTERNAL, AdapterVersion
from tandem.engine import restores
from tandem.engine.client import AsyncEngineClient
from tandem.engine.messages import (
    CallResult,
    Command,
    LoadAdapter,
    Lost,
    Message,
    Ready,
    UnloadAdapter,
    failure_of,
)
from tandem.engine.process import Launch, ProcessTransport

PARENT = f"""
import asyncio, msgspec
from tandem.core.clock import MonotonicClock
from tandem.engine.client import AsyncEngineClient
from tandem.engine.process import ProcessTransport
async def main():
    transport = ProcessTransport({CHILD!r}, msgspec.msgpack.encode({{}}), MonotonicClock())
    await AsyncEngineClient(transport).start()
    print(transport.pid, flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""


def version(folder: Path, number: int) -> AdapterVersion:
    files = folder / str(number)
    files.mkdir()
    (files / "adapter_config.json").write_text(json.dumps({"r": 4}))
    (files / "adapter_model.safetensors").write_bytes(str(number).encode())
    return AdapterVersion("formal", number, inspect_adapter(files).content_hash, str(files))


async def test_what_is_committed_while_the_engine_is_away_answers_from_the_first_request_on(
    tmp_path: Path,
) -> None:
    old, new = version(tmp_path, 46), version(tmp_path, 47)
    async with engine() as (client, transport):
        await client.publish_adapter(old)
        await kill(client, transport)
        with pytest.raises(EngineDead):
            await client.publish_adapter(new)
        client.expect_adapter(new)
        await until(lambda: client.state is EngineState.READY)
        events = [e async for e in client.generate(long_request("r", 3, adapter="formal"))]
        assert events[-1].adapter == "formal@47"
        client.expect_adapter(old)  # while it is ready, that is not how to publish
        assert client.adapters == {"formal": new}


async def test_what_is_taken_back_while_the_engine_is_away_does_not_come_back(
    tmp_path: Path,
) -> None:
    async with engine() as (client, transport):
        await client.publish_adapter(version(tmp_path, 1))
        await kill(client, transport)
        with pytest.raises(EngineDead):
            await client.unload_adapter("formal")
        await until(lambda: client.state is EngineState.READY)
        assert client.adapters == {}


async def test_what_is_being_unloaded_is_no_longer_known(tmp_path: Path) -> None:
    """Requests go to the base from then on, also if nobody waits for the engine's answer."""
    async with engine() as (client, transport):
        await client.publish_adapter(version(tmp_path, 1))
        unloading = asyncio.create_task(client.unload_adapter("formal"))
        await asyncio.sleep(0)
        assert not unloading.done() and client.adapters == {}
        unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        with pytest.raises(NotFound):
            await collect(client, long_request("r", 3, adapter="formal"))
        learns = long_request("s", 3, adapter="formal", or_base=True)
        assert {event.adapter async for event in client.generate(learns)} == {None}
        await kill(client, transport)
        await until(lambda: client.state is EngineState.READY)
        assert client.adapters == {}


class Wire:
    """A transport whose other end is the test."""

    def __init__(self) -> None:
        self.sent: list[Command] = []

    async def start(self, deliver: Callable[[Message], None]) -> None:
        """The engine is ready at once."""
        self.deliver = deliver
        self.restart(0)

    def restart(self, incarnation: int) -> None:
        """A new engine."""
        self.deliver(Ready(incarnation, INFO))

    def send(self, command: Command) -> None:
        """Keep it."""
        self.sent.append(command)

    async def close(self) -> None:
        """Nothing is open."""


async def test_an_adapter_that_finds_no_memory_after_a_restart_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else would load what was loaded by hand."""
    monkeypatch.setattr(restores, "_AGAIN_S", 0.01)
    wire, hand = Wire(), AdapterVersion("hand", 1, "hash", "/hand")
    client = AsyncEngineClient(wire)
    await client.start()
    loading = asyncio.create_task(client.load_adapter("hand", "/hand"))
    await asyncio.sleep(0)
    wire.deliver(CallResult(0, wire.sent[-1].call, result=hand))
    await loading
    wire.restart(1)
    for failure in (OutOfMemory("not now"), NoMemory("not now")):
        asked = wire.sent[-1]
        assert asked == LoadAdapter(asked.call, "hand", "/hand", hand)
        wire.deliver(CallResult(1, asked.call, failure_of(failure)))
        assert client.adapters == {}
        await until(lambda last=asked: wire.sent[-1] is not last)  # type: ignore[misc]
    wire.deliver(CallResult(1, wire.sent[-1].call, result=hand))
    assert client.adapters == {"hand": hand}
    wire.restart(2)
    wire.deliver(CallResult(2, wire.sent[-1].call, failure_of(NoMemory("not now"))))
    with pytest.raises(NotFound):
        await client.unload_adapter("hand")  # nor does it come back
    count = len(wire.sent)
    await asyncio.sleep(0.05)
    assert client.adapters == {} and len(wire.sent) == count


async def test_an_adapter_whose_files_have_changed_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restores, "_AGAIN_S", 0.01)
    wire = Wire()
    client = AsyncEngineClient(wire)
    await client.start()
    hand = AdapterVersion("hand", 1, "hash", "/hand")
    wire.deliver(Lost(0, "it is gone"))
    client.expect_adapter(hand)
    wire.restart(2)
    count = len(wire.sent)
    wire.deliver(CallResult(2, wire.sent[-1].call, failure_of(AdapterError("it has changed"))))
    await asyncio.sleep(0.05)
    assert client.adapters == {} and len(wire.sent) == count


async def test_an_engine_that_hangs_is_gone_before_it_is_said_to_be_lost() -> None:
    """Else it might go on, and write where somebody has just put things in order."""
    found: list[bool] = []
    settings = msgspec.msgpack.encode({})
    transport = ProcessTransport(CHILD, settings, MonotonicClock(), silence_s=1.0)
    pids: list[int] = []

    def deliver(message: Message) -> None:
        if isinstance(message, Ready) and not pids:
            assert transport.pid is not None
            pids.append(transport.pid)
            os.kill(pids[0], signal.SIGSTOP)
        if isinstance(message, Lost):
            found.append(lives(pids[0]))

    await transport.start(deliver)
    try:
        await until(lambda: bool(found))
    finally:
        await transport.close()
    assert found[0] is False


def test_the_engine_ends_with_its_parent() -> None:
    """A parent that is killed cannot tell its child to stop."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert lives(child)
        parent.kill()
        parent.wait()
    eventually(lambda: not lives(child))


def test_a_paused_engine_ends_with_its_parent() -> None:
    """It cannot look after that itself, and would go on writing when it is continued."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        parent.kill()
        parent.wait()
    eventually(lambda: not lives(child))


def test_an_engine_whose_parent_is_gone_before_it_begins_ends() -> None:
    """As when both were starting: its parent is another process then, which does not end."""
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    launch = Launch("ipc:///nonexistent", 0, msgspec.msgpack.encode({}), gone.pid)
    with subprocess.Popen(CHILD, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(msgspec.msgpack.encode(launch))
        child.stdin.close()
        assert child.wait(timeout=PATIENCE_S) == 1


async def test_a_candidate_that_nobody_waits_for_any_more_leaves_the_engine(
    tmp_path: Path,
) -> None:
    """Its caller was cancelled; what clients asked for by name stays, and is known."""
    hold = tmp_path / "hold"
    async with engine(hold_write=str(hold)) as (client, transport):
        await client.open_trainer(TrainerSpec("t"))
        candidate = f"{INTERNAL}candidate/formal"
        hold.touch()
        staging = asyncio.create_task(client.stage("t", candidate, str(tmp_path / "staged")))
        hand = version(tmp_path, 1)
        loading = asyncio.create_task(client.load_adapter("hand", hand.path))
        await asyncio.sleep(0)
        staging.cancel()
        loading.cancel()
        await asyncio.gather(staging, loading, return_exceptions=True)
        with patch.object(transport, "send", wraps=transport.send) as sent:
            hold.unlink()
            await until(lambda: (tmp_path / "staged").is_dir() and "hand" in client.adapters)
            await until(lambda: any(isinstance(c.args[0], UnloadAdapter) for c in sent.mock_calls))
        with pytest.raises(NotFound):
            await collect(client, long_request("r", 3, adapter=candidate))
        assert len(await collect(client, long_request("s", 3, adapter="hand"))) == 3


async def test_answers_go_on_while_a_large_adapter_is_read(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    async with engine(hold_read=str(hold)) as (client, _):
        loaded = version(tmp_path, 7)
        for load in (
            lambda: client.load_adapter("hand", loaded.path),
            lambda: client.publish_adapter(loaded),
        ):
            with holding(hold):
                loading = asyncio.create_task(load())
                await asyncio.sleep(0)
                assert len(await collect(client, long_request("r", 5))) == 5
                assert not loading.done()
            await loading
            await client.unload_adapter((await loading).name)


async def test_answers_go_on_while_the_source_of_a_trainer_is_read(tmp_path: Path) -> None:
    source = version(tmp_path, 7).path
    hold = tmp_path / "hold"
    async with engine(hold_read=str(hold)) as (client, _):
        with holding(hold):
            opening = asyncio.create_task(client.open_trainer(TrainerSpec("t", source=source)))
            await asyncio.sleep(0)
            assert len(await collect(client, long_request("r", 5))) == 5
            assert not opening.done()
        assert (await opening).name == "t"
        await client.stage("t", "formal", str(tmp_path / "staged"))


async def test_a_trainer_that_is_closed_while_its_source_is_read_does_not_open(
    tmp_path: Path,
) -> None:
    source = version(tmp_path, 7).path
    hold = tmp_path / "hold"
    async with engine(hold_read=str(hold)) as (client, _):
        spec = TrainerSpec("t", source=source)
        for close in (lambda: client.close_trainer("t"), lambda: client.open_trainer(spec)):
            with holding(hold):
                opening = asyncio.create_task(client.open_trainer(spec))
                await asyncio.sleep(0)
                closing = asyncio.create_task(close())
                await asyncio.sleep(0)
                await client.stats()  # what was sent before it has been handled
            with pytest.raises(TrainingCancelled, match="closed before it was open"):
                await opening
            await closing
        await client.stage("t", "formal", str(tmp_path / "staged"))  # the last one is open
        await client.close_trainer("t")
        with pytest.raises(AdapterError, match="there is no trainer"):
            await client.stage("t", "formal", str(tmp_path / "again"))


async def test_what_comes_back_answers_the_first_request_although_reading_takes_long(
    tmp_path: Path,
) -> None:
    async with engine(read_s=0.5) as (client, transport):
        await client.publish_adapter(version(tmp_path, 3))
        await kill(client, transport)
        await until(lambda: client.state is EngineState.READY)
        events = [e async for e in client.generate(long_request("r", 3, adapter="formal"))]
        assert events[-1].adapter == "formal@3"


@pytest.mark.parametrize("read_s", [0.0, 3600.0])
async def test_an_engine_that_stays_without_memory_is_replaced(
    tmp_path: Path, read_s: float
) -> None:
    """What it cannot do is told as a shortage; the next process has the memory again. Nobody waits
    for an adapter that is being read."""
    async with engine(short_incarnations=1, read_s=read_s) as (client, transport):
        first = transport.pid
        loading = asyncio.create_task(client.load_adapter("hand", version(tmp_path, 1).path))
        for number in range(3):
            events = [e async for e in client.generate(long_request(f"r{number}", 3))]
            assert events[-1].error == NO_MEMORY
        await until(lambda: client.state is EngineState.READY and transport.pid != first)
        await asyncio.gather(loading, return_exceptions=True)
        assert len(await collect(client, long_request("again", 3))) == 3
