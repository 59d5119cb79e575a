"""An engine that says nothing: when it is busy, when quiet, and when it counts as lost."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from test_process import collect, engine, expected, holding, long_request

from patience import until
from tandem.core.clock import MonotonicClock
from tandem.core.errors import EngineDead
from tandem.core.ports import EngineState
from tandem.engine import process
from tandem.engine.host import HEARTBEAT_S


class Jumps(MonotonicClock):
    """A clock that is set forward."""

    ahead_s = 0.0

    def now(self) -> float:
        """Seconds."""
        return super().now() + self.ahead_s


async def test_a_pause_of_this_process_is_not_the_engines_fault():
    clock = Jumps()
    async with engine(silence_s=30.0, quiet_s=30.0, clock=clock) as (client, transport):
        first = transport.pid
        await asyncio.sleep(0.5)
        clock.ahead_s = 100.0  # as if the whole event loop had stood still
        await asyncio.sleep(1.0)
        assert client.state is EngineState.READY and transport.pid == first


async def test_a_hung_engine_is_replaced():
    async with engine(silence_s=3.0, step_s=0.05) as (client, transport):
        first = transport.pid
        assert first is not None
        request = asyncio.create_task(collect(client, long_request("r")))
        await asyncio.sleep(0.2)
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(EngineDead, match="no sign of life"):
            await request
        await until(lambda: client.state is EngineState.READY)
        assert transport.pid != first and not psutil.pid_exists(first)


async def test_a_paused_engine_is_quiet_and_goes_on():
    async with engine(silence_s=3600.0, step_s=0.01) as (client, transport):
        assert transport.pid is not None
        request = asyncio.create_task(collect(client, long_request("r", 100)))
        await asyncio.sleep(0.2)
        os.kill(transport.pid, signal.SIGSTOP)
        await until(lambda: client.state is EngineState.QUIET)
        os.kill(transport.pid, signal.SIGCONT)
        await until(lambda: client.state is EngineState.READY)
        assert await request == expected(long_request("r", 100)), (
            "it was no reason to lose anything"
        )


async def test_a_quiet_engine_takes_requests():
    """The machine may be busy: what is sent waits, and is answered when the engine goes on."""
    async with engine(silence_s=3600.0) as (client, transport):
        assert transport.pid is not None
        os.kill(transport.pid, signal.SIGSTOP)
        await until(lambda: client.state is EngineState.QUIET)
        request = asyncio.create_task(collect(client, long_request("r", 5)))
        await asyncio.sleep(0.1)
        os.kill(transport.pid, signal.SIGCONT)
        assert await request == expected(long_request("r", 5))


async def test_an_engine_is_heard_while_an_iteration_takes_long(tmp_path):
    """So it is neither quiet nor taken for hanging."""
    assert HEARTBEAT_S * 4 <= process.QUIET_S < process.SILENCE_S
    hold = str(tmp_path / "hold")
    async with engine(quiet_s=60.0, silence_s=60.0, hold_step=hold) as (client, transport):
        with holding(Path(hold)):
            request = asyncio.create_task(collect(client, long_request("r", 1)))
            heard_s: set[float] = set()

            def heard() -> bool:
                heard_s.add(transport._heard_s)
                return len(heard_s) > 8

            await until(heard)
            assert client.state is EngineState.READY and not request.done()
        assert await request == expected(long_request("r", 1))


async def test_an_endless_iteration_is_ended():
    async with engine(stuck_s=1.0, step_s=3600.0) as (client, transport):
        first = transport.pid
        with pytest.raises(EngineDead, match="longer than 1 s"):
            await collect(client, long_request("r"))
        await until(lambda: client.state is EngineState.READY)
        assert transport.pid != first
