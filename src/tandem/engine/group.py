"""Several engines on one machine behind one `EngineClient`: a main one, and others beside it.

A request belongs to one engine from its start; the placement chooses it. Engines share nothing and
never wait for each other. The main engine's state is the group's, and it alone learns. The others
get the adapters of the main one. Invariant: another engine takes a request only if it is ready, has
the version that the main one would answer with, and nothing waits there for its first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from tandem.core.events import EngineStats, ModelInfo, TokenEvent
from tandem.core.lengths import Forecast
from tandem.core.ports import EngineClient, EngineState
from tandem.core.request import Request
from tandem.core.training import (
    Score,
    ScoreRequest,
    StepOutcome,
    TrainerSpec,
    TrainerState,
    TrainingStep,
)
from tandem.core.version import PINNED, AdapterVersion
from tandem.engine.following import Following
from tandem.engine.placement import MAIN, Placement


class _Other:
    """An engine beside the main one, what follows for it, and what it was given: sequences of
    requests that have not ended, and requests without a first event."""

    def __init__(self, engine: EngineClient, following: Following) -> None:
        self.engine = engine
        self.following = following
        self.sequences = 0
        self.waiting = 0

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The engine's events; the request is counted from now on."""
        self.sequences += request.n
        self.waiting += 1
        waits = True
        try:
            async with aclosing(self.engine.generate(request)) as events:
                async for event in events:
                    if waits:
                        self.waiting -= 1
                        waits = False
                    yield event
        finally:
            self.sequences -= request.n
            self.waiting -= waits


class EngineGroup:
    """Implements `tandem.core.ports.EngineClient`. All methods run in one event loop."""

    def __init__(
        self,
        main: EngineClient,
        others: Mapping[str, EngineClient],
        placement: Placement,
        max_sequences: int,
    ) -> None:
        """`others` have names, for messages and metrics, and run at most `max_sequences` at a time
        each. All serve the same model."""
        self._main = main
        self._engines = (main, *others.values())
        self._placement = placement
        self._max_sequences = max_sequences
        self._others = {
            name: _Other(each, Following(name, each, self._wanted)) for name, each in others.items()
        }
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ state

    @property
    def others(self) -> Mapping[str, EngineClient]:
        """The engines beside the main one, by name."""
        return {name: other.engine for name, other in self._others.items()}

    @property
    def state(self) -> EngineState:
        """The main engine's."""
        return self._main.state

    @property
    def info(self) -> ModelInfo:
        """The main engine's."""
        return self._main.info

    @property
    def adapters(self) -> dict[str, AdapterVersion]:
        """The main engine's; the others follow."""
        return self._main.adapters

    async def start(self) -> None:
        """Start all engines at the same time. Raises the error that made the first fail."""
        await asyncio.gather(*(engine.start() for engine in self._engines))
        self._tasks = [asyncio.create_task(o.following.run()) for o in self._others.values()]

    async def drain(self, timeout_s: float) -> bool:
        """See `EngineClient`."""
        return all(await asyncio.gather(*(engine.drain(timeout_s) for engine in self._engines)))

    async def close(self) -> None:
        """See `EngineClient`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(*(engine.close() for engine in self._engines))

    async def stats(self, last: int = 0, after: int = 0) -> EngineStats:
        """The main engine's; ask each of `others` for its own."""
        return await self._main.stats(last, after)

    # ------------------------------------------------------------------ requests

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """See `EngineClient`. The engine is chosen when the first event is asked for."""
        others = tuple(self._others.values())
        able = [n for n, other in enumerate(others, MAIN + 1) if self._able(other, request)]
        place = self._placement.place(request, [MAIN, *able])
        engine = self._main if place == MAIN else others[place - 1]
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                yield event

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """See `EngineClient`. An engine that does not have the request does nothing."""
        for engine in self._engines:
            await engine.abort(request_id, index)

    def foresee(self, request_id: str, length: Forecast) -> None:
        """See `EngineClient`. As `abort`."""
        for engine in self._engines:
            engine.foresee(request_id, length)

    def _able(self, other: _Other, request: Request) -> bool:
        """Whether `other` would answer as the main engine, and nothing waits there.

        The queue is bounded in front of all engines, by what the main one can do. So one request
        at most waits there, for a place that its policy does not have or for its KV cache.
        """
        engine = other.engine
        if engine.state is not EngineState.READY:
            return False
        if other.waiting or other.sequences + request.n > self._max_sequences:
            return False
        # Its KV cache, and so its context, may be smaller.
        needed = len(request.prompt) + request.sampling.max_tokens
        if min(needed, self.info.max_model_len) > engine.info.max_model_len:
            return False
        if request.adapter is None:
            return True
        version = self.adapters.get(request.adapter)
        return version is not None and other.following.has(version)

    # ------------------------------------------------------------------ adapters

    async def load_adapter(self, name: str, path: str) -> AdapterVersion:
        """See `EngineClient`. The others follow, and nobody waits for them."""
        try:
            return await self._main.load_adapter(name, path)
        finally:
            self._changed()

    async def unload_adapter(self, name: str) -> None:
        """See `EngineClient`."""
        try:
            await self._main.unload_adapter(name)
        finally:
            self._changed()

    async def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        """See `EngineClient`."""
        try:
            return await self._main.publish_adapter(version)
        finally:
            self._changed()

    def expect_adapter(self, version: AdapterVersion) -> None:
        """See `EngineClient`."""
        self._main.expect_adapter(version)
        self._changed()

    def _wanted(self) -> dict[str, AdapterVersion]:
        """Not candidates, references and checkpoints: the main engine alone scores and answers
        with them."""
        return {name: each for name, each in self._main.adapters.items() if _followed(each)}

    def _changed(self) -> None:
        for other in self._others.values():
            other.following.changed()

    # ------------------------------------------------------------------ learning

    async def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """See `EngineClient`."""
        return await self._main.open_trainer(spec)

    async def close_trainer(self, name: str) -> None:
        """See `EngineClient`."""
        await self._main.close_trainer(name)

    async def train(self, step: TrainingStep) -> StepOutcome:
        """See `EngineClient`."""
        return await self._main.train(step)

    async def cancel_steps(self, trainer: str) -> None:
        """See `EngineClient`."""
        await self._main.cancel_steps(trainer)

    async def stage(self, trainer: str, name: str, path: str) -> AdapterVersion:
        """See `EngineClient`. The candidate is the main engine's alone."""
        return await self._main.stage(trainer, name, path)

    async def score(self, request: ScoreRequest) -> Score:
        """See `EngineClient`."""
        return await self._main.score(request)


def _followed(version: AdapterVersion) -> bool:
    return not version.internal or version.name.startswith(PINNED)
