"""Two engines behind one client: who gets what, what both have, and what one's death costs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fake_engine import INFO, FakeEngine, Script
from patience import PATIENCE_S, until
from tandem.core.errors import EngineDead, InvalidRequest, NotFound
from tandem.core.events import TokenEvent
from tandem.core.ports import EngineClient, EngineState
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    ScoreRequest,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.core.version import INTERNAL, PINNED, AdapterVersion
from tandem.engine.group import EngineGroup


class Longest:
    """Prompts of more than three tokens belong to the second engine."""

    def place(self, request: Request, able: Sequence[int]) -> int:
        assert able[0] == 0
        return able[-1] if len(request.prompt) > 3 else 0


@asynccontextmanager
async def group(
    play: Callable[[Request, int], Script] = lambda request, index: Script(),
    other: FakeEngine | None = None,
) -> AsyncIterator[tuple[EngineGroup, FakeEngine, FakeEngine]]:
    main, other = FakeEngine(play), other or FakeEngine(play)
    engines = EngineGroup(main, {"overflow": other}, Longest(), max_sequences=4)
    await engines.start()
    try:
        yield engines, main, other
    finally:
        await engines.close()


class Slow(FakeEngine):
    """Its requests see a change at once, its client once `answered` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = asyncio.Event()
        self.answered.set()
        self.told: dict[str, AdapterVersion] = {}

    async def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        self.told[version.name] = version
        await self.answered.wait()
        return await super().publish_adapter(version)

    async def unload_adapter(self, name: str) -> None:
        self.told.pop(name, None)
        await self.answered.wait()
        await super().unload_adapter(name)


def as_client(engines: EngineGroup) -> EngineClient:
    """The group as its protocol (a type checker compares the two here)."""
    return engines


def short(name: str = "short", **more: object) -> Request:
    return Request(name, (1, 2, 3), **more)


def long(name: str = "long", **more: object) -> Request:
    return Request(name, (1, 2, 3, 4), **more)


async def collect(engines: EngineGroup, request: Request) -> list[TokenEvent]:
    return [event async for event in engines.generate(request)]


async def settled(engines: EngineGroup, adapter: str) -> None:
    """Wait until the second engine answers for `adapter`, too."""
    version = engines.adapters[adapter]
    await until(lambda: all(each.following.has(version) for each in engines._others.values()))


def names(engine: FakeEngine) -> list[str]:
    return [request.request_id for request in engine.requests]


async def test_each_request_belongs_to_the_engine_that_is_chosen():
    async with group() as (engines, main, other):
        await asyncio.gather(collect(engines, short()), collect(engines, long()))
        assert (names(main), names(other)) == (["short"], ["long"])


async def test_while_the_second_engine_is_away_the_main_one_takes_its_share():
    async with group() as (engines, main, other):
        for state in (EngineState.DEAD, EngineState.STARTING, EngineState.QUIET):
            other.state = state
            await collect(engines, long(state))
        assert names(main) == ["dead", "starting", "quiet"]
        other.state = EngineState.READY
        await collect(engines, long("again"))
        assert names(other) == ["again"]


async def test_nothing_waits_for_the_second_engine():
    """One request at a time waits for its first token there; what comes meanwhile is the main
    engine's, so the queue in front of both is the main one's."""
    tokens = tuple(range(10, 40))
    async with group(lambda r, i: Script(tokens, delay_s=0.01)) as (engines, main, other):
        burst = [asyncio.create_task(collect(engines, long(f"burst {i}"))) for i in range(5)]
        await until(lambda: len(main.running) == 4)
        assert names(other) == ["burst 0"]
        await asyncio.sleep(0.05)  # it has begun
        more = asyncio.create_task(collect(engines, long("more")))
        await until(lambda: "more" in other.running)
        await asyncio.gather(*burst, more)


async def test_the_second_engine_gets_no_more_sequences_than_it_runs():
    tokens = tuple(range(10, 40))
    async with group(lambda r, i: Script(tokens, delay_s=0.01)) as (engines, main, other):

        async def begin(request: Request) -> AsyncGenerator[TokenEvent, None]:
            events = engines.generate(request)
            await anext(events)
            return events

        three, one, fifth = [
            await begin(each) for each in (long("three", n=3), long("one"), long("fifth"))
        ]
        assert (names(other), names(main)) == (["three", "one"], ["fifth"])
        await three.aclose()
        await collect(engines, long("four", n=4))
        await collect(engines, long("room", n=3))
        assert (names(other)[2:], names(main)[1:]) == (["room"], ["four"])
        await one.aclose()
        await fifth.aclose()


async def test_what_never_began_takes_no_place_in_the_second_engine():
    async with group() as (engines, _, other):
        for _ in range(9):
            await engines.generate(long("never")).aclose()
        other.refuse = InvalidRequest("no")
        for place in range(9):
            with pytest.raises(InvalidRequest):
                await collect(engines, long(f"refused {place}"))
        other.refuse = None
        await collect(engines, long())
        assert names(other) == ["long"]


async def test_the_death_of_one_engine_costs_the_other_nothing():
    tokens = tuple(range(10, 22))

    def play(request: Request, index: int) -> Script:
        dies = 5 if request.request_id == "long" else None
        return Script(tokens, delay_s=0.005, dies_after=dies)

    async with group(play) as (engines, _, other):
        lost, kept = await asyncio.gather(
            collect(engines, long()), collect(engines, short()), return_exceptions=True
        )
        assert isinstance(lost, EngineDead)
        assert isinstance(kept, list) and len(kept) == len(tokens) + 1
        assert other.state is EngineState.DEAD
        assert engines.state is EngineState.READY, "the server is ready as long as the main one is"


async def test_the_death_of_the_main_engine_is_that_of_the_group():
    async with group() as (engines, main, _):
        main.die()
        assert engines.state is EngineState.DEAD
        with pytest.raises(EngineDead):
            await collect(engines, short())
        with pytest.raises(EngineDead):
            await engines.stats()
        assert len(await collect(engines, long())) == 4, "the other engine lives"


async def test_what_does_not_fit_into_the_second_engine_stays_with_the_main_one():
    async with group() as (engines, main, other):
        other.info = replace(INFO, max_model_len=8)
        await collect(engines, long("fits", sampling=SamplingParams(max_tokens=4)))
        await collect(engines, long("does not", sampling=SamplingParams(max_tokens=5)))
        assert (names(main), names(other)) == (["does not"], ["fits"])
        other.info = INFO
        await collect(engines, long("any", sampling=SamplingParams(max_tokens=10_000)))
        assert names(other) == ["fits", "any"], "an answer ends at the model's context anyway"


async def test_aborts_reach_the_engine_that_has_the_request():
    async with group(lambda r, i: Script((10,) * 200, delay_s=0.005)) as (engines, _, other):
        answer = asyncio.create_task(collect(engines, long(n=2)))
        await until(lambda: bool(other.running))
        await engines.abort("long", 1)
        await until(lambda: other.running["long"] == {0})
        await engines.abort("long")
        await asyncio.wait_for(answer, PATIENCE_S)


async def test_adapters_are_in_all_engines_with_the_same_version():
    async with group() as (engines, main, other):
        await engines.load_adapter("formal", "/a")
        loaded = await engines.load_adapter("formal", "/b")
        assert loaded.label == "formal@2"
        await settled(engines, "formal")
        assert other.adapters == main.adapters
        for request in (short(adapter="formal"), long(adapter="formal")):
            assert {event.adapter for event in await collect(engines, request)} == {"formal@2"}
        assert names(other) == ["long"]
        published = AdapterVersion("formal", 7, "hash", "/c")
        pinned = AdapterVersion(f"{PINNED}1", 3, "hash 3", "/d")
        for version in (published, pinned):
            await engines.publish_adapter(version)
        await until(lambda: other.adapters == main.adapters)
        assert other.adapters == {"formal": published, pinned.name: pinned}
        await engines.unload_adapter("formal")
        await until(lambda: "formal" not in other.adapters)
        with pytest.raises(NotFound):
            await engines.unload_adapter("formal")


async def test_until_the_second_engine_has_the_version_the_main_one_answers():
    async with group() as (engines, main, other):
        await engines.load_adapter("formal", "/a")
        await until(lambda: other.adapters == main.adapters)
        await engines.publish_adapter(AdapterVersion("formal", 2, "hash", "/b"))
        events = await collect(engines, long(adapter="formal"))  # before the other one has it
        assert events[0].adapter == "formal@2" and names(main) == ["long"]


async def test_what_is_rolled_back_does_not_answer_while_the_second_engine_takes_it():
    old, new = (AdapterVersion("formal", n, f"hash {n}", f"/{n}") for n in (1, 2))
    other = Slow()
    async with group(other=other) as (engines, main, _):
        await engines.publish_adapter(old)
        await settled(engines, "formal")
        other.answered.clear()
        await engines.publish_adapter(new)
        await until(lambda: other.told["formal"] == new)
        await engines.publish_adapter(old)
        assert other.adapters["formal"] == main.adapters["formal"] == old, "as far as it is known"
        await collect(engines, long(adapter="formal"))
        assert names(main)[-1] == "long", "the second engine answers with formal@2 now"
        other.answered.set()
        await until(lambda: other.told["formal"] == old)
        await settled(engines, "formal")


async def test_what_the_second_engine_unloads_is_not_asked_of_it():
    other = Slow()
    async with group(other=other) as (engines, main, _):
        await engines.load_adapter("formal", "/a")
        await settled(engines, "formal")
        other.answered.clear()
        await engines.unload_adapter("formal")
        await until(lambda: not other.told)
        main.adapters["formal"] = other.adapters["formal"]  # the same again
        await collect(engines, long(adapter="formal"))
        assert names(main)[-1] == "long", "the second engine would not find it"


async def test_candidates_references_and_checkpoints_are_the_main_engines_alone(tmp_path: Path):
    async with group() as (engines, main, other):
        await engines.open_trainer(TrainerSpec("formal"))
        candidate = f"{INTERNAL}candidate/formal"
        await engines.stage("formal", candidate, str(tmp_path / "1"))
        for name in (f"{INTERNAL}reference/formal/1", f"{INTERNAL}checkpoint-of/formal/1"):
            await engines.publish_adapter(AdapterVersion(name, 1, "hash", "/a"))
        with pytest.raises(NotFound):
            await engines.unload_adapter(f"{INTERNAL}reference/formal/2")
        kept = main.adapters[candidate]
        with pytest.raises(EngineDead):
            main.state = EngineState.DEAD
            await engines.unload_adapter(candidate)
        main.state, main.adapters[candidate] = EngineState.READY, kept  # not unloaded after all
        await asyncio.sleep(0.05)
        assert len(main.adapters) == 3 and not other.adapters


async def test_a_second_engine_that_comes_back_confirms_what_it_has(monkeypatch):
    """It may fail to load what it had."""
    monkeypatch.setattr("tandem.engine.following._LOOK_S", 0.01)
    other = Slow()
    async with group(other=other) as (engines, main, _):
        await engines.load_adapter("formal", "/a")
        await settled(engines, "formal")
        other.die()
        await asyncio.sleep(0.05)
        await other.start()
        other.answered.clear()
        await collect(engines, long(adapter="formal"))
        assert names(main)[-1] == "long" and other.adapters == main.adapters
        other.answered.set()
        await settled(engines, "formal")


async def test_a_version_that_the_second_engine_cannot_load_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr("tandem.engine.following._LOOK_S", 0.01)
    async with group() as (engines, main, other):
        main.adapters["formal"] = AdapterVersion("formal", 1, "hash", "/is/broken")
        with caplog.at_level(logging.WARNING, "tandem.engine.following"):
            await asyncio.sleep(0.2)
        (told,) = [record.getMessage() for record in caplog.records]
        assert "the overflow engine does not follow in formal@1" in told
        await collect(engines, long(adapter="formal"))
        assert names(main) == ["long"] and not other.adapters
        main.adapters["formal"] = AdapterVersion("formal", 2, "hash", "/is/whole")
        await until(lambda: other.adapters == main.adapters)


async def test_a_second_engine_that_comes_back_gets_what_it_missed(monkeypatch):
    monkeypatch.setattr("tandem.engine.following._LOOK_S", 0.01)
    async with group() as (engines, main, other):
        other.die()
        await engines.load_adapter("formal", "/a")
        await asyncio.sleep(0.05)
        assert not other.adapters
        await other.start()
        await until(lambda: other.adapters == main.adapters)


async def test_the_second_engine_follows_what_a_dead_main_engine_is_to_have():
    async with group() as (engines, main, other):
        await engines.load_adapter("formal", "/a")
        main.die()
        version = AdapterVersion("formal", 2, "hash", "/b")
        with pytest.raises(EngineDead):
            await engines.publish_adapter(version)
        engines.expect_adapter(version)
        await until(lambda: other.adapters == {"formal": version})


async def test_only_the_main_engine_learns(tmp_path: Path):
    async with group() as (engines, main, other):
        await engines.open_trainer(TrainerSpec("formal"))
        pair = (TrainingSequence((1, 2, 3), 1, Role.TARGET),)
        step = TrainingStep("s", "formal", LossSpec(LossKind.SFT), (pair,))
        assert (await engines.train(step)).applied
        candidate = f"{INTERNAL}candidate/formal"
        staged = await engines.stage("formal", candidate, str(tmp_path / "1"))
        await engines.score(ScoreRequest("score", (1, 2, 3), 1, candidate))
        await asyncio.sleep(0.05)
        assert main.adapters == {candidate: staged} and not other.adapters
        await collect(engines, long(adapter=candidate))
        assert names(main) == ["long"], "a candidate is asked where it is"
        await engines.publish_adapter(replace(staged, name="formal"))
        await engines.unload_adapter(candidate)
        await until(lambda: other.adapters == main.adapters)
        assert list(other.adapters) == ["formal"]
        await engines.cancel_steps("formal")
        await engines.close_trainer("formal")
        assert main.closed == ["formal"] and not (other.opened or other.steps or other.scores)


async def test_both_engines_drain_and_close():
    async with group(lambda r, i: Script((10,) * 10, delay_s=0.02)) as (engines, main, other):
        answer = asyncio.create_task(collect(engines, long()))
        await until(lambda: bool(other.running))
        assert not await engines.drain(0.01)
        assert engines.state is EngineState.DRAINING
        assert await engines.drain(PATIENCE_S)
        assert len(await answer) == 11
    assert main.state is other.state is EngineState.DEAD
