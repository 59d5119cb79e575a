"""An engine that plays a script: exact tokens, delays, failures and deaths on demand.

It keeps the contract of `EngineClient` (events until every choice ended, abort, drain, death), so
that the services and the API can be tested to the letter without a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from tandem.core.errors import AdapterError, EngineDead, NotFound
from tandem.core.events import EngineStats, ModelInfo, RequestTimes, TokenEvent
from tandem.core.plan import TokenLogprob
from tandem.core.ports import EngineClient, EngineState
from tandem.core.request import Request
from tandem.core.sequence import FinishReason
from tandem.core.version import AdapterVersion

INFO = ModelInfo(
    model="fake",
    architecture="FakeForCausalLM",
    device="cpu",
    dtype="float32",
    vocab_size=2048,
    max_model_len=256,
    eos_token_ids=(2,),
    block_size=16,
    num_blocks=64,
    num_parameters=0,
    weight_bytes=0,
    kernels="none",
)


@dataclass(frozen=True, slots=True)
class Script:
    """What one choice does: `tokens`, one event each, `delay_s` before each of them.

    After the tokens it ends with `finish` (`stop_token` is then appended), or with LENGTH where
    `max_tokens` is reached. With `dies_after` the engine dies after so many tokens.
    """

    tokens: tuple[int, ...] = (10, 11, 12)
    finish: FinishReason = FinishReason.STOP
    stop_token: int | None = 2
    delay_s: float = 0.0
    dies_after: int | None = None
    error: str | None = None


def logprob_of(token: int, alternatives: int) -> TokenLogprob:
    """A made-up but recognisable log-probability: -token / 1000, alternatives token, token + 1.."""
    top = tuple((token + k, -(token + k) / 1000) for k in range(alternatives))
    return TokenLogprob(token, -token / 1000, 1, top)


def _dead() -> EngineDead:
    return EngineDead("the engine ended; it restarts, try again", retry_after_s=3.0)


def _prompt_scores(request: Request) -> list[TokenEvent]:
    """The prompt's log-probabilities in two parts, as if its chunks had been computed apart."""
    wanted = request.sampling.prompt_logprobs
    if wanted is None:
        return []
    scores = tuple(logprob_of(token, wanted) for token in request.prompt[1:])
    half = len(scores) // 2
    parts = [part for part in (scores[:half], scores[half:]) if part]
    return [TokenEvent(request.request_id, 0, prompt_logprobs=part) for part in parts]


@dataclass
class FakeEngine:
    """See the module; `play` gives each choice its script."""

    play: Callable[[Request, int], Script] = lambda request, index: Script()
    info: ModelInfo = INFO
    state: EngineState = EngineState.READY
    adapters: dict[str, AdapterVersion] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    running: dict[str, set[int]] = field(default_factory=dict)
    cached_tokens: int = 0
    refuse: Exception | None = None

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Play the scripts of all choices, one token of each in turn."""
        if self.state is not EngineState.READY:
            raise _dead()
        if self.refuse is not None:
            raise self.refuse
        if request.adapter is not None and request.adapter not in self.adapters:
            raise NotFound(f"no adapter {request.adapter}", param="model")
        self.requests.append(request)
        self.running[request.request_id] = set(range(request.n))
        scripts = {index: self.play(request, index) for index in range(request.n)}
        position = 0
        try:
            for event in _prompt_scores(request):
                yield event
            while self.running[request.request_id]:
                await asyncio.sleep(max(script.delay_s for script in scripts.values()))
                for index in sorted(self.running[request.request_id]):
                    yield self._event(request, index, position, scripts[index])
                position += 1
        finally:
            self.running.pop(request.request_id, None)

    def _event(self, request: Request, index: int, position: int, script: Script) -> TokenEvent:
        if script.dies_after == position:
            self.state = EngineState.DEAD
        if self.state is EngineState.DEAD:
            raise _dead()
        sampling = request.sampling
        over = position >= len(script.tokens)
        token = script.stop_token if over else script.tokens[position]
        tokens = () if token is None else (token,)
        finish = script.finish if over else None
        if finish is None and position + 1 >= sampling.max_tokens:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.running[request.request_id].discard(index)
        adapter = self.adapters.get(request.adapter or "")
        return TokenEvent(
            request_id=request.request_id,
            index=index,
            tokens=tokens,
            logprobs=tuple(
                logprob_of(token, sampling.logprobs)
                for token in tokens
                if sampling.logprobs is not None
            ),
            finish_reason=finish,
            stop_token=script.stop_token if over and finish is FinishReason.STOP else None,
            adapter=adapter.label if adapter else None,
            cached_tokens=self.cached_tokens,
            times=RequestTimes(0.0, 0.5, 1.0, 1.0 + position) if finish else None,
            error=script.error if over else None,
        )

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Remember the call and stop the choice."""
        self.aborted.append((request_id, index))
        if index is None:
            self.running.get(request_id, set()).clear()
        else:
            self.running.get(request_id, set()).discard(index)

    async def load_adapter(self, name: str, path: str) -> AdapterVersion:
        """Count up the name's version; a path that ends in `broken` is refused."""
        if path.endswith("broken"):
            raise AdapterError(f"{path} has no adapter_config.json")
        number = self.adapters[name].number + 1 if name in self.adapters else 1
        self.adapters[name] = AdapterVersion(name, number, f"hash-{name}-{number}", path)
        return self.adapters[name]

    async def unload_adapter(self, name: str) -> None:
        """Forget the name."""
        del self.adapters[name]

    async def stats(self) -> EngineStats:
        """Numbers that a test can recognise."""
        if self.state is EngineState.DEAD:
            raise _dead()
        return EngineStats(
            running=sum(len(choices) for choices in self.running.values()),
            waiting=7,
            kv_blocks_used=16,
            kv_blocks_total=64,
            prefix_queries_tokens=100,
            prefix_hits_tokens=40,
            preemptions=3,
            prompt_tokens=1000,
            generation_tokens=500,
            iterations=6,
            iteration_tokens_hist={1: 2, 64: 3, 100_000: 1},
            iteration_tokens_sum=100_194,
        )

    async def start(self) -> None:
        """Ready at once."""
        self.state = EngineState.READY

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs."""
        self.state = EngineState.DRAINING
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.running and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        return not self.running

    async def close(self) -> None:
        """Dead at once."""
        self.state = EngineState.DEAD


def as_client(engine: FakeEngine) -> EngineClient:
    """The fake as its protocol (a type checker compares the two here)."""
    return engine
