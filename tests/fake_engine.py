"""An engine that plays a script: exact tokens, delays, failures and deaths on demand.

It keeps the contract of `EngineClient` (events until every choice ended, abort, drain, death; steps
of a trainer in order, cancelled ones raise), so that the services and the API can be tested to the
letter without a model.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from fake_scores import logprob_at, logprob_of, loss_of, score_of
from tandem.adapters.files import inspect_adapter
from tandem.core.errors import (
    AdapterError,
    EngineDead,
    InvalidRequest,
    NotFound,
    TrainerLost,
    TrainingCancelled,
)
from tandem.core.events import EngineStats, IterationRecord, ModelInfo, RequestTimes, TokenEvent
from tandem.core.lengths import Forecast
from tandem.core.ports import EngineClient, EngineState
from tandem.core.request import Request
from tandem.core.sequence import FinishReason
from tandem.core.training import (
    Score,
    ScoreRequest,
    StepOutcome,
    TrainerSpec,
    TrainerState,
    TrainingStep,
)
from tandem.core.version import AdapterVersion

INFO = ModelInfo(
    model="fake", architecture="FakeForCausalLM", device="cpu", dtype="float32",
    vocab_size=2048, max_model_len=256, eos_token_ids=(2,), block_size=16, num_blocks=64,
    num_parameters=0, weight_bytes=0, kernels="none", num_layers=2, recording_tokens=512,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Script:
    """What one choice does: `tokens`, one event each, `delay_s` before each of them.

    After the tokens it ends with `finish` (`stop_token` is then appended), or with LENGTH where
    `max_tokens` is reached. With `dies_after` the engine dies after so many tokens. With `gate`, no
    more than `free` tokens come before that is set.
    """

    tokens: tuple[int, ...] = (10, 11, 12)
    finish: FinishReason = FinishReason.STOP
    stop_token: int | None = 2
    delay_s: float = 0.0
    dies_after: int | None = None
    error: str | None = None
    gate: threading.Event | None = None
    free: int = 0

    def holds(self, position: int) -> bool:
        """Whether this token has to wait; the gate is asked once for each that may go on."""
        return self.gate is not None and position >= self.free and not self.gate.is_set()


def _iteration(number: int) -> IterationRecord:
    """One that began a second after the one before, at second 0 of the machine's clock."""
    return IterationRecord(number, float(number), 0.5, 0.3, 0.1, 2, 30, 4, 5, 6, 1)


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
    """See the module; `play` gives each choice its script.

    Learning: `steps` lists the steps that were applied, `spec_of` the specs of open trainers,
    `opened` those of all that ever were, and `closed` the names of closed ones. A step takes
    `step_s`, and none ends while `most_steps` are applied; `judge` may raise instead of letting it
    be applied, or return a problem, with which it ends unapplied. `score_as` answers a score
    request under a label (`name@number`, `working/trainer@revision` or None). `die` ends the engine
    under everything that is pending; after `start` it serves the same adapters, without trainers.
    """

    play: Callable[[Request, int], Script] = lambda request, index: Script()
    info: ModelInfo = INFO
    state: EngineState = EngineState.READY
    adapters: dict[str, AdapterVersion] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    aborted: list[tuple[str, int | None]] = field(default_factory=list)
    running: dict[str, set[int]] = field(default_factory=dict)
    cached_tokens: int = 0
    state_of: Callable[[Request], bytes] = lambda request: b""
    foreseen: list[tuple[str, Forecast]] = field(default_factory=list)
    refuse: Exception | None = None
    step_s: float = 0.0
    most_steps: float = math.inf
    judge: Callable[[TrainingStep], str | None] = lambda step: None
    score_as: Callable[[ScoreRequest, str | None], float] = lambda request, under: score_of(
        request.tokens, request.prompt_tokens, under
    )
    trainers: dict[str, TrainerState] = field(default_factory=dict)
    spec_of: dict[str, TrainerSpec] = field(default_factory=dict)
    opened: list[TrainerSpec] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    steps: list[TrainingStep] = field(default_factory=list)
    scores: list[ScoreRequest] = field(default_factory=list)
    published: list[AdapterVersion] = field(default_factory=list)
    _pending: dict[str, dict[str, asyncio.Future[str]]] = field(default_factory=dict)
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict)
    _lost: set[str] = field(default_factory=set)

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Play the scripts of all choices, one token of each in turn."""
        if self.state is not EngineState.READY:
            raise _dead()
        if self.refuse is not None:
            raise self.refuse
        known = request.adapter is None or request.adapter in self.adapters or request.or_base
        if not known:
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
                if any(script.holds(position) for script in scripts.values()):
                    await asyncio.sleep(0.001)
                    continue
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
            state=self.state_of(request) if request.wants_state and not position else b"",
        )

    def foresee(self, request_id: str, length: Forecast) -> None:
        """Remember what is said."""
        self.foreseen.append((request_id, length))

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
        if name not in self.adapters:
            raise NotFound(f"there is no adapter {name!r}", param="name")
        del self.adapters[name]
        self._require_ready()

    async def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        """Make it current; a path that ends in `broken` is refused."""
        self._require_ready()
        if version.path.endswith("broken"):
            raise AdapterError(f"{version.path} has no adapter_config.json")
        self.adapters[version.name] = version
        self.published.append(version)
        return version

    def expect_adapter(self, version: AdapterVersion) -> None:
        """Serve it after `start`."""
        if self.state is not EngineState.READY:
            self.adapters[version.name] = version

    async def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """A trainer at revision 0, or at what `stage` wrote into its source."""
        self._require_ready()
        revision = 0
        if spec.source:
            state = Path(spec.source) / "trainer_state.json"
            if state.is_file():
                revision = json.loads(state.read_text())["revision"]
            elif spec.resume:
                raise AdapterError(f"{spec.source} has no optimiser state")
        await self.close_trainer(spec.name)
        self.spec_of[spec.name] = spec
        self.opened.append(spec)
        self._lost.discard(spec.name)
        self.trainers[spec.name] = TrainerState(spec.name, revision, 1000)
        return self.trainers[spec.name]

    async def close_trainer(self, name: str) -> None:
        """Cancel its steps and forget it."""
        await self.cancel_steps(name)
        self._lost.discard(name)
        self.spec_of.pop(name, None)
        if self.trainers.pop(name, None) is not None:
            self.closed.append(name)

    async def train(self, step: TrainingStep) -> StepOutcome:
        """Wait for `step_s`, then raise the revision; the losses fall (`loss_of`)."""
        self._require_ready()
        self._require_trainer(step.trainer)
        if any(step.step_id in steps for steps in self._pending.values()):
            raise InvalidRequest(f"step id {step.step_id!r} is in use")
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending.setdefault(step.trainer, {})[step.step_id] = end
        try:
            async with self._turns.setdefault(step.trainer, asyncio.Lock()):
                await asyncio.wait((end,), timeout=self.step_s)
                while len(self.steps) >= self.most_steps and not end.done():
                    await asyncio.wait((end,), timeout=0.001)
                if self.state is EngineState.DEAD:
                    raise _dead()
                if end.done():
                    raise TrainingCancelled(end.result())
                return self._apply(step)
        finally:
            del self._pending[step.trainer][step.step_id]

    def _apply(self, step: TrainingStep) -> StepOutcome:
        problem = self.judge(step)
        before = self.trainers[step.trainer]
        revision = before.revision + (problem is None)
        if problem is None:
            self.steps.append(step)
            self.trainers[step.trainer] = TrainerState(before.name, revision, before.num_parameters)
        return StepOutcome(
            step_id=step.step_id,
            trainer=step.trainer,
            revision=revision,
            applied=problem is None,
            loss=loss_of(before.revision),
            grad_norm=1.0,
            learning_rate=self.spec_of[step.trainer].optimizer.learning_rate,
            logprobs=tuple(
                tuple(logprob_at(sequence, before.revision) for sequence in batch)
                for batch in step.micro_batches
            ),
            arrival_s=0.0,
            started_s=0.0,
            finished_s=self.step_s,
            problem=problem,
        )

    async def cancel_steps(self, trainer: str) -> None:
        """Pending steps of `trainer` raise `TrainingCancelled`."""
        for end in self._pending.get(trainer, {}).values():
            if not end.done():
                end.set_result(f"the steps of {trainer} were cancelled")

    async def stage(self, trainer: str, name: str, path: str) -> AdapterVersion:
        """Write files that look like an adapter and name the trainer's revision; load them."""
        self._require_ready()
        self._require_trainer(trainer)
        state, folder = self.trainers[trainer], Path(path)
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            raise AdapterError(f"{folder} exists already", param="path") from error
        spec = self.spec_of[trainer]
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": spec.lora.rank, "lora_alpha": spec.lora.alpha})
        )
        (folder / "adapter_model.safetensors").write_bytes(f"{trainer} {state.revision}".encode())
        (folder / "trainer_state.json").write_text(json.dumps({"revision": state.revision}))
        await asyncio.sleep(0)
        number = self.adapters[name].number + 1 if name in self.adapters else 1
        content_hash = inspect_adapter(folder).content_hash
        self.adapters[name] = AdapterVersion(name, number, content_hash, str(folder))
        return self.adapters[name]

    async def score(self, request: ScoreRequest) -> Score:
        """`score_as` under the version, the trainer's revision, or the base model."""
        self._require_ready()
        under = None
        if request.trainer is not None:
            self._require_trainer(request.trainer)
            under = f"working/{request.trainer}@{self.trainers[request.trainer].revision}"
        elif request.adapter is not None:
            if request.adapter not in self.adapters:
                raise NotFound(f"no adapter {request.adapter}", param="model")
            under = self.adapters[request.adapter].label
        if not 0 < request.prompt_tokens < len(request.tokens):
            raise InvalidRequest("a score needs a prompt and a completion")
        if len(request.tokens) > self.info.max_model_len:
            raise InvalidRequest("longer than the model's context", code="context_length_exceeded")
        self.scores.append(request)
        await asyncio.sleep(0)
        if self.state is EngineState.DEAD:
            raise _dead()
        label = under if request.trainer is None else None
        scored = len(request.tokens) - request.prompt_tokens
        return Score(request.request_id, self.score_as(request, under), scored, label)

    def die(self) -> None:
        """The engine ends: whatever is pending raises `EngineDead`, trainers are gone."""
        self.state = EngineState.DEAD
        self._lost |= set(self.trainers)
        self.trainers.clear()
        self.spec_of.clear()
        for steps in self._pending.values():
            for end in steps.values():
                if not end.done():
                    end.set_result("the engine died")

    def _require_ready(self) -> None:
        if self.state is not EngineState.READY:
            raise _dead()

    def _require_trainer(self, name: str) -> None:
        if name in self._lost:
            raise TrainerLost(f"trainer {name} went with its engine")
        if name not in self.trainers:
            raise NotFound(f"there is no trainer {name!r}; open it first", param="trainer")

    async def stats(self, last: int = 0, after: int = 0) -> EngineStats:
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
            kv_blocks_held={"online": 12, "offline": 4, "learning": 0},
            work_s={"decode": 1.5, "host": 0.25},
            recent=tuple(_iteration(n) for n in range(max(after, 6 - last) + 1, 7)),
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
