"""`Executor` on one device: computes each plan when it is submitted.

Owns the weights and the KV tensors; decides nothing that the plan does not say. Invariant: a
failure ends the sequences concerned, and the other sequences of the plan get their results.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from tandem.config import AdapterConfig, CacheConfig, LearningConfig, SchedulingConfig
from tandem.core.errors import AdapterError, OutOfMemory
from tandem.core.events import ModelInfo
from tandem.core.plan import (
    NO_MEMORY,
    BackwardSlice,
    DrawResult,
    LanePlan,
    ScoreResult,
    SliceResult,
    Span,
    StepResult,
    Update,
    UpdateResult,
)
from tandem.core.ports import TrainerSnapshot, Urgent, never
from tandem.core.training import TrainerSpec, TrainerState
from tandem.core.version import AdapterVersion
from tandem.executor.batch import SpanLimits, build_batch
from tandem.executor.device import wait_for
from tandem.executor.forward import GaveWay, SpanOutcome, run_batch
from tandem.executor.kv_storage import (
    KVStorage,
    choose_num_blocks,
    free_memory_bytes,
    lazy_zeros,
)
from tandem.executor.memory import whole_account
from tandem.executor.recorder import Recorder
from tandem.executor.shortage import lacks_memory, reason_of, relieve
from tandem.executor.starts import trainable_linears
from tandem.executor.training import TrainingState, as_lora
from tandem.model.account import model_bytes
from tandem.model.load import LoadedModel
from tandem.model.lora_files import read_lora
from tandem.model.sampling import NOT_FINITE
from tandem.processor import FreeCores
from tandem.training.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# Share of free memory for recordings, the same again for graphs, and again for trainers. The number
# of recording tokens has a limit too: more are never needed.
_RECORDING_SHARE = 0.1
_MOST_RECORDING_TOKENS = 1 << 17
_DEFAULT_LEARNING = LearningConfig()


class DeviceExecutor:
    """Implements `tandem.core.ports.Executor` on one device."""

    def __init__(
        self,
        model: LoadedModel,
        cache: CacheConfig,
        scheduling: SchedulingConfig,
        adapters: AdapterConfig,
        learning: LearningConfig = _DEFAULT_LEARNING,
        *,
        share_cores: bool = False,
    ) -> None:
        """Allocates the KV cache and memory for recordings. With `share_cores` it leaves CPU cores
        that other processes use to them. Raises `InvalidRequest` if the cache does not fit."""
        self._model = model
        self.compile_grammar = model.grammars.compile
        self._max_rank = adapters.max_rank
        num_blocks = choose_num_blocks(model, cache, scheduling)
        self._storage = KVStorage(
            model.layers, num_blocks, cache.block_size, device=model.device, dtype=model.dtype
        )
        self._limits = SpanLimits(
            model.vocab_size, model.max_model_len, num_blocks, cache.block_size
        )
        self._training = _make_training(model, learning, adapters.max_rank)
        self._info = ModelInfo(
            model=model.name,
            architecture=model.architecture,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=model.vocab_size,
            max_model_len=_context(model.max_model_len, num_blocks * cache.block_size),
            eos_token_ids=model.eos_token_ids,
            block_size=cache.block_size,
            num_blocks=num_blocks,
            num_parameters=model.num_parameters,
            layer_parameters=model.layer_parameters,
            weight_bytes=model.weight_bytes,
            kernels=model.kernels,
            num_layers=len(model.layers),
            recording_tokens=self._training.recordings.capacity if self._training else 0,
            max_rank=adapters.max_rank,
            linears=trainable_linears(model),
            weights_hash=model.weights_hash,
            threads=torch.get_num_threads() if model.device.type == "cpu" else 0,
        )
        self._threads = self._info.threads
        shares = share_cores and self._threads > 1
        self._free_cores = FreeCores(self._threads) if shares else None
        self._finished: list[StepResult] = []
        self._tickets = 0

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._info

    def submit(self, plan: LanePlan, urgent: Urgent = never) -> int:
        """Compute `plan`; `poll` returns its result.

        A device that computes asynchronously finishes what it was given before the plan is
        preempted. Raises `OutOfMemory` if a shortage affects the plan as a whole.
        """
        # Autograd's own thread for a device would have to be woken for each layer, and it starts
        # without the device's context.
        with torch.autograd.set_multithreading_enabled(False):
            try:
                result = self._execute(plan, urgent if plan.gives_way else never)
            except (RuntimeError, MemoryError) as error:
                if not lacks_memory(error):
                    raise
                relieve()
                raise OutOfMemory(NO_MEMORY) from error
        self._finished.append(result)
        self._tickets += 1
        return self._tickets

    def _execute(self, plan: LanePlan, stop: Urgent) -> StepResult:
        started = time.perf_counter()
        self._use(plan.share)
        self._prepare(plan)
        failed: dict[int, str] = {}
        runnable: list[int] = []
        for place, span in enumerate(plan.spans):
            problem = self._span_problem(span)
            if problem is None:
                runnable.append(place)
            else:
                _charge(failed, span, problem)
        self._storage.copy(plan.copies)
        stopped = False
        try:
            outcomes = self._compute(plan.spans, runnable, failed, stop)
        except GaveWay:
            stopped = True
            plan, outcomes = replace(plan, spans=(), slices=(), updates=()), {}
            failed.clear()
        draws, scores = self._collect(plan.spans, outcomes, failed)
        wait_for(self._model.device)
        forwarded = time.perf_counter()
        kept = self._training.kept(plan.spans) if self._training is not None else ()
        slices = [result for each in plan.slices if (result := self._run_slice(each, stop))]
        due = takewhile(lambda _: not stop(), plan.updates)
        updates = tuple(self._run_update(each) for each in due)
        return StepResult(
            plan.step,
            plan.lane,
            time.perf_counter() - started,
            draws,
            scores,
            tuple(failed.items()),
            forward_s=forwarded - started,
            slices=tuple(slices),
            updates=updates,
            kept=kept,
            stopped=stopped,
        )

    def _use(self, share: float) -> None:
        """Compute on a share of the CPU's threads from now on, at least one."""
        if self._model.device.type != "cpu":
            return
        most = self._info.threads if self._free_cores is None else self._free_cores.count()
        threads = max(1, round(share * most))
        if threads != self._threads:
            self._threads = threads
            torch.set_num_threads(threads)

    def poll(self) -> list[StepResult]:
        """Results of all plans submitted since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def read_adapter(self, version: AdapterVersion) -> Callable[[], None]:
        """See `Executor`."""
        try:
            adapter = read_lora(
                version.path,
                self._model.lora.linears,
                device=self._model.device,
                dtype=self._model.dtype,
                max_rank=self._max_rank,
            )
        except (MemoryError, RuntimeError) as error:
            if lacks_memory(error):
                raise OutOfMemory(f"there is no memory for adapter {version.label} now") from error
            raise AdapterError(f"cannot load adapter {version.label}: {error}") from error
        return lambda: self._model.lora.add(version.content_hash, adapter)

    def drop_adapter(self, content_hash: str) -> None:
        """Forget an adapter. Does nothing if it is not loaded."""
        self._model.lora.drop(content_hash)

    def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """See `Executor`."""
        return self._required_training().open_trainer(spec)

    def read_trainer(self, spec: TrainerSpec) -> Callable[[], TrainerState]:
        """See `Executor`."""
        return self._required_training().read_trainer(spec)

    def close_trainer(self, name: str) -> None:
        """See `Executor`."""
        if self._training is not None:
            self._training.close_trainer(name)

    def snapshot_trainer(self, name: str) -> Checkpoint:
        """See `Executor`."""
        return self._required_training().snapshot_trainer(name)

    def adopt(self, snapshot: TrainerSnapshot, content_hash: str) -> None:
        """See `Executor`; `snapshot` is one of this executor's."""
        if not isinstance(snapshot, Checkpoint):
            raise AdapterError("only a snapshot of this engine's own trainers can be adopted")
        if content_hash not in self._model.lora:
            flat = snapshot.parameters.to(self._model.dtype, copy=True)
            adapter = as_lora(snapshot.layout.pairs(flat), snapshot.layout)
            self._model.lora.add(content_hash, adapter)

    def memory_bytes(self) -> dict[str, int]:
        """See `Executor`."""
        account = model_bytes(self._model) | {"kv": self._storage.nbytes}
        training = self._training
        account |= training.memory_bytes() if training is not None else {}
        working = training.working_bytes if training is not None else 0
        account |= {"adapters": self._model.lora.nbytes - working}
        return whole_account({"recordings": 0, **account}, self._model.device)

    @property
    def training(self) -> TrainingState:
        """Trainers and recordings, for checks and tests. Raises `AdapterError` without any."""
        return self._required_training()

    def _required_training(self) -> TrainingState:
        if self._training is None:
            raise AdapterError("this engine does not train: it is off, or the model cannot be")
        return self._training

    def _prepare(self, plan: LanePlan) -> None:
        if plan.discards or plan.opens:
            training = self._required_training()
            for discard in plan.discards:
                training.discard(discard)
            for each in plan.opens:
                training.open_micro_batch(each)

    def _span_problem(self, span: Span) -> str | None:
        problem = self._limits.problem(span, self._model.lora)
        if problem is None and span.record is not None:
            return self._required_training().span_problem(span)
        return problem

    def _run_slice(self, plan: BackwardSlice, urgent: Urgent) -> SliceResult | None:
        return self._required_training().run_slice(plan, urgent)

    def _run_update(self, plan: Update) -> UpdateResult:
        return self._required_training().run_update(plan)

    def _compute(
        self, spans: Sequence[Span], runnable: list[int], failed: dict[int, str], urgent: Urgent
    ) -> dict[int, SpanOutcome]:
        """Outcomes by place in the plan. If the pass fails as a whole, the spans run one by one.

        Raises `GaveWay`.
        """
        if not runnable:
            return {}
        try:
            return self._run(spans, runnable, urgent)
        except (RuntimeError, MemoryError, ValueError, IndexError) as error:
            if len(runnable) == 1:
                logger.exception("a span cannot be computed")
                _charge(failed, spans[runnable[0]], reason_of(error, "the forward pass"))
                return {}
            if lacks_memory(error):
                relieve()
            logger.exception("an iteration failed, running its %d spans alone", len(runnable))
        outcomes: dict[int, SpanOutcome] = {}
        for place in runnable:
            outcomes.update(self._compute(spans, [place], failed, urgent))
        return outcomes

    def _run(
        self, spans: Sequence[Span], places: list[int], urgent: Urgent
    ) -> dict[int, SpanOutcome]:
        storage, model = self._storage, self._model
        batch = build_batch(
            [spans[place] for place in places], storage.block_size, model.device, model.dtype
        )
        recorder = None
        if any(span.record is not None for span in batch.spans):
            training = self._required_training()
            graphs = training.graph_keeper(batch)
            inner = training.inner_keeper(batch) if graphs is None else None
            recorder = Recorder(training.recordings, batch, graphs, inner)
        try:
            outcomes = run_batch(model, storage, batch, recorder, urgent)
        except GaveWay:
            if recorder is not None:
                recorder.abandon()
            raise
        return {places[at]: outcome for at, outcome in zip(batch.order, outcomes, strict=True)}

    def _collect(
        self, spans: Sequence[Span], outcomes: dict[int, SpanOutcome], failed: dict[int, str]
    ) -> tuple[tuple[DrawResult, ...], tuple[ScoreResult, ...]]:
        """Results in plan order. Spans that are not finite fail, and their KV is made harmless."""
        draws: list[DrawResult] = []
        scores: list[ScoreResult] = []
        for place, span in enumerate(spans):
            outcome = outcomes.get(place)
            if outcome is None:
                continue
            if outcome.score_failed or NOT_FINITE in outcome.draws:
                self._storage.scrub(span.block_tables[0])
                if span.draws or span.score_top is not None:
                    _charge(failed, span, NOT_FINITE)
                else:  # nan is the answer to a score on its own
                    scores.append(ScoreResult(span.seq_id, span.start, (), math.nan))
                continue
            for draw, drawn in zip(span.draws, outcome.draws, strict=True):
                if isinstance(drawn, str):
                    failed[draw.seq_id] = drawn
                else:
                    draws.append(drawn)
            if outcome.score is not None:
                scores.append(outcome.score)
        return tuple(draws), tuple(scores)


def _make_training(
    model: LoadedModel, learning: LearningConfig, max_rank: int
) -> TrainingState | None:
    """Memory for recordings and trainers, as configured or as shares of free memory. None if the
    engine does not train."""
    if not learning.enabled or model.stack is None:
        return None
    each = len(model.layers) * model.width * model.dtype.itemsize
    tokens = learning.recording_tokens
    if not tokens:
        tokens = int(free_memory_bytes(model.device) * _RECORDING_SHARE) // each
        tokens = min(tokens, _MOST_RECORDING_TOKENS)
    size = (len(model.layers), max(tokens, 1), model.width)
    arena = lazy_zeros(size, model.device, model.dtype)
    room = int(free_memory_bytes(model.device) * _RECORDING_SHARE)
    return TrainingState(
        model,
        arena,
        max_rank,
        graph_budget=min(learning.graph_bytes, room),
        trainer_budget=learning.trainer_bytes or room,
    )


def _context(model_tokens: int, cache_tokens: int) -> int:
    """The longest sequence that can be served: the model's context, or the size of the cache."""
    if cache_tokens < model_tokens:
        logger.warning(
            "the KV cache holds %d tokens, less than the model's context of %d; sequences are "
            "limited to that (give the cache more memory for longer ones)",
            cache_tokens,
            model_tokens,
        )
    return min(model_tokens, cache_tokens)


def _charge(failed: dict[int, str], span: Span, reason: str) -> None:
    """Mark a span's own sequence, and those that draw from its last row, as failed."""
    for seq_id in (span.seq_id, *(draw.seq_id for draw in span.draws)):
        failed[seq_id] = reason
