"""Two engine processes behind one client: what `kill -9` of one leaves of the other's work."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
from test_process import CHILD, expected, long_request

from patience import START_S, until
from tandem.build import build_client, overflow_settings
from tandem.config import CacheConfig, LearningConfig, ModelConfig, SchedulingConfig, Settings
from tandem.core.clock import MonotonicClock
from tandem.core.errors import EngineDead
from tandem.core.lengths import Forecast
from tandem.core.ports import EngineClient, EngineState
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.engine.client import AsyncEngineClient
from tandem.engine.division import Division
from tandem.engine.group import EngineGroup
from tandem.engine.process import ProcessTransport
from tandem.processor import core_numbers
from tiny_models import save_adapter, save_model

needs_cores = pytest.mark.skipif(len(core_numbers()) < 2, reason="two engines need two cores")


class Named:
    """Requests whose names begin with `long` belong to the second engine."""

    def place(self, request: Request, able: Sequence[int]) -> int:
        return able[-1] if request.request_id.startswith("long") else 0


@asynccontextmanager
async def two_engines(**behaviour: object) -> AsyncIterator[tuple[EngineGroup, ProcessTransport]]:
    """And the transport of the second one."""
    settings = msgspec.msgpack.encode(behaviour)
    main, second = (
        ProcessTransport(CHILD, settings, MonotonicClock(), name=name)
        for name in ("engine", "overflow engine")
    )
    others = {"overflow": AsyncEngineClient(second)}
    engines = EngineGroup(AsyncEngineClient(main), others, Named(), max_sequences=8)
    try:
        await engines.start()
        yield engines, second
    finally:
        await engines.close()


async def collect(engines: EngineClient, request: Request) -> list[int]:
    return [token async for event in engines.generate(request) for token in event.tokens]


async def test_kill_9_of_the_second_engine_under_load_loses_nothing_of_the_main_one():
    async with two_engines(step_s=0.05) as (engines, second):
        kept = [long_request(f"short {i}", 60) for i in range(8)]
        lost = [long_request(f"long {i}", 300) for i in range(8)]
        answers = [asyncio.create_task(collect(engines, each)) for each in kept]
        lose = []
        for each in lost:  # one after another: none waits there
            lose.append(asyncio.create_task(collect(engines, each)))
            await asyncio.sleep(0)
            await until(lambda: not engines._others["overflow"].waiting)
        assert (await engines.others["overflow"].stats()).running == 8
        os.kill(second.pid or 0, signal.SIGKILL)
        for error in await asyncio.gather(*lose, return_exceptions=True):
            assert isinstance(error, EngineDead)
            assert "the overflow engine process ended" in str(error)
            assert "send it again" in str(error)
        assert engines.state is EngineState.READY
        again = long_request("long again", 3)
        assert await collect(engines, again) == expected(again), "the main engine takes it"
        assert await asyncio.gather(*answers) == [expected(each) for each in kept]
        await until(lambda: engines.others["overflow"].state is EngineState.READY)
        back = long_request("long and back", 3)
        assert await collect(engines, back) == expected(back)
        assert (await engines.others["overflow"].stats()).generation_tokens == 3


async def test_the_second_engine_comes_back_with_what_was_published_meanwhile(tmp_path: Path):
    async with two_engines() as (engines, second):
        other = engines.others["overflow"]
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4}))
        weights = tmp_path / "adapter_model.safetensors"
        weights.write_bytes(b"one")
        await engines.load_adapter("formal", str(tmp_path))
        await until(lambda: other.adapters == engines.adapters)
        os.kill(second.pid or 0, signal.SIGKILL)
        await until(lambda: other.state is not EngineState.READY)
        weights.write_bytes(b"two")
        version = await engines.load_adapter("formal", str(tmp_path))
        assert version.label == "formal@2"
        await until(lambda: other.adapters == engines.adapters)
        assert other.state is EngineState.READY
        request = long_request("long", 3, adapter="formal")
        events = [event async for event in engines.generate(request)]
        assert events[-1].adapter == "formal@2"
        assert (await other.stats()).generation_tokens == 3


# ------------------------------------------------------------------ the real engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A model and two adapters of it."""
    folder = tmp_path_factory.mktemp("tiny")
    return save_model(folder, "llama"), [save_adapter(folder, "llama", seed) for seed in (1, 2)]


def settings(model: Path) -> Settings:
    return Settings(
        model=ModelConfig(model=str(model)),
        cache=CacheConfig(memory_bytes=1 << 22),
        scheduling=SchedulingConfig(accustom_s=0.0, overflow="cores:1"),
        learning=LearningConfig(enabled=False),
    )


def request(name: str, expected_tokens: int, adapter: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    length = Forecast((float(expected_tokens),) * 5, 1000, "test")
    return Request(name, (5, 6, 7, 8), sampling, adapter=adapter, length=length)


def test_the_overflow_engine_is_on_the_cpu_and_does_not_learn() -> None:
    given = Settings(
        model=ModelConfig(device="cuda", dtype="float16", threads=3),
        cache=CacheConfig(memory_bytes=1 << 33),
        scheduling=SchedulingConfig(profile="of-the-gpu.json", policy="fcfs"),
    )
    found = overflow_settings(given, Division((), (1,), gpu=True))
    assert found.model == ModelConfig(device="cpu", dtype="auto", threads=0)
    assert found.cache.memory_bytes == 0
    assert found.scheduling == SchedulingConfig(profile="", policy="fcfs")
    assert not found.learning.enabled
    beside = overflow_settings(given, Division((0,), (1,), gpu=False))
    assert (beside.model.dtype, beside.cache.memory_bytes) == ("float16", 1 << 33)


def test_one_engine_is_no_group() -> None:
    client = build_client(Settings())
    assert isinstance(client, AsyncEngineClient)


@contextmanager
def engine_children() -> Iterator[dict[str, psutil.Process]]:
    """The processes of both engines, by name."""
    found = {}
    for child in psutil.Process().children():
        if "tandem.build" in child.cmdline():
            cores = child.cmdline()[child.cmdline().index("tandem.build") + 1 :]
            assert child.cpu_affinity() == [int(core) for core in cores]
            found["overflow" if cores == [str(core_numbers()[-1])] else "main"] = child
    yield found


@pytest.mark.full
@needs_cores
@pytest.mark.skipif(sys.platform != "linux", reason="cores of processes")
async def test_real_engines_on_cores_of_their_own_answer_alike(tiny: tuple[Path, list[Path]]):
    """Adapters and versions in both; one that is killed comes back with them."""
    model, adapters = tiny
    engines = build_client(settings(model))
    assert isinstance(engines, EngineGroup)
    other = engines.others["overflow"]
    try:
        await engines.start()
        for tokens in range(1, 33):  # so that there is a threshold
            await collect(engines, request(f"first {tokens}", tokens))
        for path in adapters:
            await engines.load_adapter("formal", str(path))
        await until(lambda: other.adapters == engines.adapters)
        before = (await other.stats()).generation_tokens
        said = {}
        for adapter in (None, "formal"):
            for name, tokens in (("short", 1), ("long", 100)):
                asked = request(f"{name} {adapter}", tokens, adapter)
                events = [event async for event in engines.generate(asked)]
                assert events[-1].adapter == (adapter and "formal@2")
                said[name, adapter] = [token for event in events for token in event.tokens]
        assert (await other.stats()).generation_tokens == before + 24, "the long ones are its own"
        for adapter in (None, "formal"):
            assert said["short", adapter] == said["long", adapter]
        assert said["long", None] != said["long", "formal"]

        with engine_children() as processes:
            assert set(processes) == {"main", "overflow"}
            processes["overflow"].kill()
        await until(lambda: other.state is not EngineState.READY)
        version = engines.adapters["formal"]
        assert await collect(engines, request("away", 100, "formal")) == said["long", "formal"]
        await until(lambda: other.state is EngineState.READY, START_S)
        await until(lambda: all(each.following.has(version) for each in engines._others.values()))
        assert await collect(engines, request("back", 100, "formal")) == said["long", "formal"]
        assert (await other.stats()).generation_tokens == 12
    finally:
        await engines.close()
