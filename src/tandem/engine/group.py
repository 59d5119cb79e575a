"""Several engines on one machine behind one `EngineClient`: a main one, and others beside it.

A request belongs to one engine from its start; the placement chooses it. Engines share nothing and
never wait for each other. The main engine's state is the group's, and it alone learns. The others
get the adapters of the main one. Invariant: an engine takes a request only if it is ready and has
the version that the main one would answer with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

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


class EngineGroup:
    """Implements `tandem.core.ports.EngineClient`. All methods run in one event loop."""

    def __init__(
        self, main: EngineClient, others: Mapping[str, EngineClient], placement: Placement
    ) -> None:
        """`others` have names, for messages and metrics. All serve the same model."""
        self._main = main
        self._others = dict(others)
        self._engines = (main, *others.values())
        self._placement = placement
        self._following = [Following(name, each, self._wanted) for name, each in others.items()]
        self._tasks: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------------ state

    @property
    def others(self) -> Mapping[str, EngineClient]:
        """The engines beside the main one, by name."""
        return self._others

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
        self._tasks = [asyncio.create_task(each.run()) for each in self._following]

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

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """See `EngineClient`. The engine is chosen now, not at the first event."""
        able = [MAIN]
        for number, following in enumerate(self._following, MAIN + 1):
            if self._able(self._engines[number], following, request):
                able.append(number)
        return self._engines[self._placement.place(request, able)].generate(request)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """See `EngineClient`. An engine that does not have the request does nothing."""
        for engine in self._engines:
            await engine.abort(request_id, index)

    def foresee(self, request_id: str, length: Forecast) -> None:
        """See `EngineClient`. As `abort`."""
        for engine in self._engines:
            engine.foresee(request_id, length)

    def _able(self, engine: EngineClient, following: Following, request: Request) -> bool:
        if engine.state is not EngineState.READY:
            return False
        # Its KV cache, and so its context, may be smaller.
        needed = len(request.prompt) + request.sampling.max_tokens
        if min(needed, self.info.max_model_len) > engine.info.max_model_len:
            return False
        if request.adapter is None:
            return True
        version = self.adapters.get(request.adapter)
        return version is not None and following.has(version)

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
        for each in self._following:
            each.changed()

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
