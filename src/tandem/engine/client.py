"""The async handle on an engine: `EngineClient` over any transport.

The one bridge between the engine and asyncio. It follows the engine's state through its messages,
hands tokens to the requests that wait for them, and restores adapters after a restart. Invariant:
every request that was begun ends with its last event or an exception, whatever happens below.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from types import NoneType

from tandem.core.clock import Clock, MonotonicClock
from tandem.core.errors import EngineDead, InvalidRequest, NotFound, TandemError, TrainerLost
from tandem.core.events import EngineStats, ModelInfo, TokenEvent
from tandem.core.lengths import Forecast
from tandem.core.ports import EngineState
from tandem.core.request import Request
from tandem.core.training import (
    Score,
    ScoreRequest,
    StepOutcome,
    TrainerSpec,
    TrainerState,
    TrainingStep,
)
from tandem.core.version import AdapterVersion
from tandem.engine.calls import Calls, Result
from tandem.engine.messages import (
    Abort,
    AddRequest,
    AddScore,
    Broken,
    CallResult,
    CancelSteps,
    CloseTrainer,
    Command,
    Failure,
    Foresee,
    GetStats,
    LoadAdapter,
    Loading,
    Lost,
    Message,
    OpenTrainer,
    PublishAdapter,
    Quiet,
    Ready,
    Refused,
    StageTrainer,
    Tokens,
    Train,
    UnloadAdapter,
    to_exception,
)
from tandem.engine.restores import Restores
from tandem.engine.transport import Transport

logger = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 30.0
Progress = Callable[[str, float], None]


class _Stream:
    """A request in flight: its events and the choices that have not ended."""

    def __init__(self, choices: int) -> None:
        self.events: asyncio.Queue[TokenEvent | TandemError | None] = asyncio.Queue()
        self.open = set(range(choices))


class AsyncEngineClient:
    """Implements `tandem.core.ports.EngineClient`. All methods run in one event loop."""

    def __init__(
        self,
        transport: Transport,
        *,
        preload: Mapping[str, str] | None = None,
        on_progress: Progress | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`preload` (name -> PEFT directory) is loaded by `start`, which raises if that fails.

        `clock` is the engine's. It gives the arrival of requests that bring none.
        """
        self._transport = transport
        self._clock = clock or MonotonicClock()
        self._preload = dict(preload or {})
        self._on_progress = on_progress
        self._state = EngineState.STARTING
        self._draining = self._quiet = False
        self._incarnation = 0
        self._info: ModelInfo | None = None
        self._adapters: dict[str, AdapterVersion] = {}
        self._streams: dict[str, _Stream] = {}
        self._calls = Calls(self._unclaimed)
        self._restores = Restores(self._adapters, self._calls.number, transport.send)
        self._trainers: set[str] = set()
        self._lost_trainers: set[str] = set()
        self._started: asyncio.Future[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # ------------------------------------------------------------------ state

    @property
    def state(self) -> EngineState:
        """See `EngineClient`."""
        if self._draining:
            return EngineState.DRAINING
        if self._state is not EngineState.READY:
            return self._state
        return EngineState.QUIET if self._quiet else EngineState.READY

    @property
    def info(self) -> ModelInfo:
        """See `EngineClient`."""
        if self._info is None:
            raise EngineDead("the model is still being loaded; try again in a few seconds")
        return self._info

    @property
    def adapters(self) -> dict[str, AdapterVersion]:
        """See `EngineClient`."""
        return dict(self._adapters)

    async def start(self) -> None:
        """See `EngineClient`."""
        self._started = asyncio.get_running_loop().create_future()
        await self._transport.start(self._receive)
        await self._started
        for name, path in self._preload.items():
            await self.load_adapter(name, path)

    async def drain(self, timeout_s: float) -> bool:
        """See `EngineClient`."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """See `EngineClient`."""
        await self._transport.close()
        self._lose("the engine was closed")

    # ------------------------------------------------------------------ requests

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """See `EngineClient`."""
        self._require_ready()
        if request.request_id in self._streams:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        stream = _Stream(request.n)
        self._streams[request.request_id] = stream
        self._idle.clear()
        if not request.arrival_s:
            request = replace(request, arrival_s=self._clock.now())
        try:
            self._transport.send(AddRequest(request))
            while stream.open:
                item = await stream.events.get()
                if isinstance(item, TandemError):
                    stream.open.clear()
                    raise item
                if item is None or item.index not in stream.open:
                    continue
                if item.finish_reason is not None:
                    stream.open.discard(item.index)
                yield item
        finally:
            del self._streams[request.request_id]
            if not self._streams:
                self._idle.set()
            if stream.open:
                self._transport.send(Abort(request.request_id))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """See `EngineClient`."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._transport.send(Abort(request_id, index))
        stream.open -= {index} if index is not None else set(stream.open)
        stream.events.put_nowait(None)  # wakes a reader whose next event will not come

    def foresee(self, request_id: str, length: Forecast) -> None:
        """See `EngineClient`."""
        if request_id in self._streams:
            self._transport.send(Foresee(request_id, length))

    # ------------------------------------------------------------------ calls

    async def load_adapter(self, name: str, path: str) -> AdapterVersion:
        """See `EngineClient`."""
        version = await self._call(AdapterVersion, lambda call: LoadAdapter(call, name, path))
        self._adapters[name] = version
        self._restores.forget(name)
        return version

    async def unload_adapter(self, name: str) -> None:
        """See `EngineClient`."""
        self._restores.forget(name)
        # First, so that nobody asks for it any more, whatever becomes of the call; the next engine
        # is not told of it either.
        if self._adapters.pop(name, None) is None:
            raise NotFound(f"there is no adapter {name!r}", param="name")
        await self._call(NoneType, lambda call: UnloadAdapter(call, name))
        self._adapters.pop(name, None)  # published before, and answered meanwhile

    async def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        """See `EngineClient`."""
        published = await self._call(AdapterVersion, lambda call: PublishAdapter(call, version))
        self._adapters[version.name] = published
        self._restores.forget(version.name)
        return published

    def expect_adapter(self, version: AdapterVersion) -> None:
        """See `EngineClient`."""
        if self._state is not EngineState.READY:
            self._adapters[version.name] = version
            self._restores.forget(version.name)

    # ------------------------------------------------------------------ learning

    async def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """See `EngineClient`."""
        incarnation = self._incarnation
        opened = await self._call(TrainerState, lambda call: OpenTrainer(call, spec))
        if self._incarnation != incarnation:  # it died after its answer
            raise EngineDead(f"trainer {spec.name} went with its engine")
        self._trainers.add(spec.name)
        self._lost_trainers.discard(spec.name)
        return opened

    async def close_trainer(self, name: str) -> None:
        """See `EngineClient`."""
        self._trainers.discard(name)
        self._lost_trainers.discard(name)
        await self._call(NoneType, lambda call: CloseTrainer(call, name))

    async def train(self, step: TrainingStep) -> StepOutcome:
        """See `EngineClient`. Cancelling the call does not cancel the step; see `cancel_steps`."""
        self._require_ready()
        self._require_trainer(step.trainer)
        return await self._call(StepOutcome, lambda call: Train(call, step))

    async def cancel_steps(self, trainer: str) -> None:
        """See `EngineClient`."""
        await self._call(NoneType, lambda call: CancelSteps(call, trainer))

    async def stage(self, trainer: str, name: str, path: str) -> AdapterVersion:
        """See `EngineClient`."""
        self._require_trainer(trainer)
        version = await self._call(
            AdapterVersion, lambda call: StageTrainer(call, trainer, name, path)
        )
        self._adapters[name] = version
        return version

    async def score(self, request: ScoreRequest) -> Score:
        """See `EngineClient`. Cancelling the call cancels the score."""
        self._require_ready()
        self._require_trainer(request.trainer)
        try:
            return await self._call(Score, lambda call: AddScore(call, request))
        except asyncio.CancelledError:
            self._transport.send(Abort(request.request_id))
            raise

    # ------------------------------------------------------------------ the engine itself

    async def stats(self, last: int = 0, after: int = 0) -> EngineStats:
        """See `EngineClient`."""
        try:
            async with asyncio.timeout(_STATS_TIMEOUT_S):
                return await self._call(EngineStats, lambda call: GetStats(call, last, after))
        except TimeoutError as error:
            raise EngineDead("the engine does not answer") from error

    async def _call(self, kind: type[Result], make: Callable[[int], Command]) -> Result:
        """Do what `make` gives for a call's number; its result, which is of `kind`."""
        if self._state is not EngineState.READY:
            self._refuse()
        return await self._calls.result(kind, lambda call: self._transport.send(make(call)))

    def _require_ready(self) -> None:
        if self._draining or self._state is not EngineState.READY:
            self._refuse()

    def _require_trainer(self, name: str | None) -> None:
        if name in self._lost_trainers:
            raise TrainerLost(f"trainer {name} went with its engine; open it again")

    def _refuse(self) -> None:
        if self.state is EngineState.DRAINING:
            raise EngineDead("the server is shutting down and takes no new requests")
        raise EngineDead(f"the engine is {self._state.value}; try again in a few seconds")

    # ------------------------------------------------------------------ messages

    def _receive(self, message: Message) -> None:  # noqa: C901
        if message.incarnation < self._incarnation:
            return  # of an engine that has died
        match message:
            case Tokens():
                self._deliver(message.events)
            case Refused():
                self._end(message.request_id, to_exception(message.failure))
            case CallResult():
                self._take_answer(message)
            case Loading():
                self._state = EngineState.STARTING
                if self._on_progress is not None:
                    self._on_progress(message.stage, message.fraction)
            case Ready():
                self._incarnation = message.incarnation
                self._become_ready(message.info)
            case Broken():
                self._fail_start(message.failure)
            case Quiet():
                self._quiet = message.quiet
            case Lost():
                self._incarnation = message.incarnation + 1
                self._lose(message.reason)
            case _:
                pass  # heartbeats concern the transport

    def _take_answer(self, answer: CallResult) -> None:
        self._restores.take(answer)
        self._calls.take(answer)

    def _unclaimed(self, version: AdapterVersion) -> None:
        """Loaded, and whoever asked for it does not wait any more."""
        if version.internal:
            self._transport.send(UnloadAdapter(self._calls.number(), version.name))
        else:
            self._adapters[version.name] = version

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.events.put_nowait(event)

    def _end(self, request_id: str, error: TandemError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.events.put_nowait(error)

    def _become_ready(self, info: ModelInfo) -> None:
        self._info = info
        self._state, self._quiet = EngineState.READY, False
        self._restores.begin()
        if self._started is not None and not self._started.done():
            self._started.set_result(None)

    def _fail_start(self, failure: Failure) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_exception(to_exception(failure))
        else:
            self._state = EngineState.DEAD
            logger.error("the engine cannot start: %s", failure.message)

    def _lose(self, reason: str) -> None:
        self._state = EngineState.DEAD
        self._lost_trainers |= self._trainers
        self._trainers.clear()
        message = f"{reason}; the request was lost, send it again"
        for request_id in list(self._streams):
            self._end(request_id, EngineDead(message))
        self._calls.lose(reason)
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDead(reason))
