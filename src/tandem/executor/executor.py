"""`Executor` on one device: gives it each plan when it is submitted.

Owns the weights and the KV tensors; decides nothing that the plan does not say. Invariant: a
failure ends the sequences concerned, and the other sequences of the plan get their results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from tandem.config import AdapterConfig, CacheConfig, LearningConfig, SchedulingConfig
from tandem.core.errors import AdapterError, OutOfMemory
from tandem.core.events import ModelInfo
from tandem.core.plan import LanePlan, Span, StepResult
from tandem.core.ports import TrainerSnapshot, Urgent, never
from tandem.core.training import TrainerSpec, TrainerState
from tandem.core.version import AdapterVersion
from tandem.executor.batch import Batch, SpanLimits, build_batch
from tandem.executor.capture import Capture
from tandem.executor.captured import CapturedPasses, PassLimits
from tandem.executor.device import RunAhead, mark
from tandem.executor.forward import CapturedPass, Drawn, Preempted, RunningBatch, run_batch
from tandem.executor.kv_storage import KVStorage, choose_num_blocks
from tandem.executor.memory import whole_account
from tandem.executor.recorder import Recorder
from tandem.executor.replay import as_lora
from tandem.executor.shortage import lacks_memory, reason_of, relieve, shortage_raised
from tandem.executor.starts import trainable_linears
from tandem.executor.submitted import RunningSlice, SubmittedPlan, charge
from tandem.executor.training import TrainingState, training_state
from tandem.model.account import model_bytes
from tandem.model.load import LoadedModel
from tandem.model.lora_files import read_lora
from tandem.processor import FreeCores
from tandem.training.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

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
        self._max_rows = scheduling.max_batch_tokens
        self._max_sequences = scheduling.max_sequences
        num_blocks = choose_num_blocks(model, cache, scheduling)
        self._storage = KVStorage(
            model.layers, num_blocks, cache.block_size, device=model.device, dtype=model.dtype
        )
        self._limits = SpanLimits(
            model.vocab_size, model.max_model_len, num_blocks, cache.block_size
        )
        self._training = training_state(model, learning, adapters.max_rank)
        self.info = ModelInfo(
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
        self.runs_ahead = False
        self._trails = model.device.type == "cuda"  # slices may go on after a result
        self._trailing: tuple[RunningSlice, ...] = ()
        self._threads = self.info.threads
        shares = share_cores and self._threads > 1
        self._free_cores = FreeCores(self._threads) if shares else None
        self._captured: CapturedPasses | None = None
        self._submitted: list[SubmittedPlan] = []
        self._finished: list[StepResult] = []
        self._tickets = 0

    def capture_passes(self, capture: Capture, seconds: float) -> None:
        """Compute by captured passes from now on. The usual ones are recorded now, in about
        `seconds` (0: none), others when they are first needed."""
        training, info = self._training, self.info
        blocks = -(-info.max_model_len // info.block_size)
        arenas = (training.arena, training.inner_arena) if training is not None else (None, None)
        self._captured = CapturedPasses(
            self._model,
            self._storage,
            capture,
            PassLimits(self._max_rows, self._max_sequences, blocks),
            *arenas,
        )
        if seconds:
            self._captured.warm(seconds)

    def submit(self, plan: LanePlan, urgent: Urgent = never) -> int:
        """Give `plan` to the device; `poll` waits for it. A CPU computes before this returns, any
        device does so with updates, and with a pass before slices of which more is asked than
        tokens and sums.

        A device that computes asynchronously finishes what it was given before the plan is
        preempted. Raises `OutOfMemory` if a shortage affects the plan as a whole.
        """
        # Autograd's own thread for a device would have to be woken for each layer, and it starts
        # without the device's context.
        with torch.autograd.set_multithreading_enabled(False), shortage_raised():
            if not plan.follows:
                self._conclude()  # what a pass left on the device is valid until the next one
            self._submitted.append(self._execute(plan, urgent if plan.preemptible else never))
        self._tickets += 1
        return self._tickets

    def _execute(self, plan: LanePlan, stop: Urgent) -> SubmittedPlan:
        device = self._model.device
        inputs = self._drawn_before() if plan.follows else None
        submitted = SubmittedPlan(plan, mark(device), inputs=inputs, trailing=self._trailing)
        self._use(plan.share)
        self._prepare(plan)
        runnable: list[int] = []
        for place, span in enumerate(plan.spans):
            problem = self._span_problem(span, inputs)
            if problem is None:
                runnable.append(place)
            else:
                charge(submitted.failed, span, problem)
        self._storage.copy(plan.copies)
        try:
            self._compute(submitted, runnable, stop)
        except Preempted:
            submitted.plan = plan = replace(plan, spans=(), slices=(), updates=())
            submitted.stopped = True
            submitted.failed.clear()
        submitted.forwarded = submitted.ended = mark(device)
        if self._captured is not None:
            submitted.recording_s = self._captured.take_recording_s()
        if self._training is not None:
            submitted.kept = self._training.kept(plan.spans)
        if plan.slices or plan.updates:
            self._learn(submitted, stop)
        self._trailing = submitted.slices if submitted.trailed else ()
        return submitted

    def _learn(self, submitted: SubmittedPlan, stop: Urgent) -> None:
        """Slices behind the pass, so that the device need not wait for them to be prepared; then
        updates, once all that is done."""
        plan, train = submitted.plan, self._required_training()
        if not self._trails or submitted.computes_more:
            submitted.take_outcomes()
        ahead = RunAhead(self._model.device) if plan.preemptible else None
        if ahead is not None:
            ahead.given()  # the pass
        slices = [found for each in plan.slices if (found := train.run_slice(each, stop, ahead))]
        submitted.slices = tuple(slices)
        waits = not (plan.preemptible or any(span.draws for span in plan.spans))
        submitted.trailed = self._trails and not (waits or plan.updates)
        if plan.updates:
            submitted.take_outcomes()
            mark(self._model.device).wait()
            due = takewhile(lambda _: not stop(), plan.updates)
            submitted.updates = tuple([train.run_update(each) for each in due])
        submitted.ended = mark(self._model.device)

    def _drawn_before(self) -> Drawn:
        """What the plan in flight draws. Raises `RuntimeError` if it was not one pass."""
        before = self._submitted[-1].passes if self._submitted else []
        if len(before) != 1:
            raise RuntimeError("the plan before was computed in parts")
        return before[0][1].drawn

    def _use(self, share: float) -> None:
        """Compute on a share of the CPU's threads from now on, at least one."""
        if self._model.device.type != "cpu":
            return
        most = self.info.threads if self._free_cores is None else self._free_cores.count()
        threads = max(1, round(share * most))
        if threads != self._threads:
            self._threads = threads
            torch.set_num_threads(threads)

    def poll(self) -> list[StepResult]:
        """Results of all plans that have none yet, but for one that follows another of them. Waits
        for them. Raises like `submit`."""
        follows = bool(self._submitted) and self._submitted[-1].plan.follows
        with shortage_raised():
            self._conclude(int(follows and len(self._submitted) + len(self._finished) > 1))
        finished, self._finished = self._finished, []
        return finished

    def _conclude(self, keep: int = 0) -> None:
        """Wait for all plans but the last `keep`."""
        count = len(self._submitted) - keep
        submitted, self._submitted = self._submitted[:count], self._submitted[count:]
        self._finished += [each.result(self._storage.scrub) for each in submitted]

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

    def _span_problem(self, span: Span, inputs: Drawn | None) -> str | None:
        problem = self._limits.problem(span, self._model.lora, undrawn=inputs is not None)
        if problem is None and inputs is not None and span.seq_id not in inputs.rows:
            return "the plan before has not drawn its token"
        if problem is None and span.record is not None:
            return self._required_training().span_problem(span)
        return problem

    def _compute(
        self, submitted: SubmittedPlan, runnable: list[int], urgent: Urgent, *, again: bool = False
    ) -> None:
        """Run the spans at these places. If the pass fails as a whole, they run one by one
        (`again`).

        Raises `Preempted`.
        """
        if not runnable:
            return
        spans = [submitted.plan.spans[place] for place in runnable]
        try:
            order, running = self._run(spans, urgent, submitted.inputs)
            if again or self._model.device.type == "cpu":
                running.outcomes()  # the next pass overwrites what this one left; a CPU is done
        except (RuntimeError, MemoryError, ValueError, IndexError) as error:
            if len(runnable) == 1:
                logger.exception("a span cannot be computed")
                charge(submitted.failed, spans[0], reason_of(error, "the forward pass"))
                return
            if lacks_memory(error):
                relieve()
            logger.exception("an iteration failed, running its %d spans alone", len(runnable))
        else:
            submitted.passes.append(([runnable[at] for at in order], running))
            return
        for place in runnable:
            self._compute(submitted, [place], urgent, again=True)

    def _run(
        self, spans: Sequence[Span], urgent: Urgent, inputs: Drawn | None
    ) -> tuple[list[int], RunningBatch]:
        """The running batch, and the place in `spans` of each of its spans."""
        batch = build_batch(spans, self._storage.block_size, self._model.dtype)
        if inputs is not None:
            batch = replace(batch, drawn=inputs.of([span.seq_id for span in batch.spans]))
        captured = self._find_captured(batch)
        if self._model.device.type == "cuda":
            self.runs_ahead = captured is not None  # a pass layer by layer waits for the one before
        recorder = self._recorder(batch, captured)
        try:
            running = run_batch(self._model, self._storage, batch, recorder, urgent, captured)
        except Preempted:
            if recorder is not None:
                recorder.abandon()
            raise
        return batch.order, running

    def _find_captured(self, batch: Batch) -> CapturedPass | None:
        """None also for a pass that keeps graphs, for which its layers are computed otherwise."""
        training = self._training
        keeps = training is not None and training.recordings.keeps_graphs
        if self._captured is None or (keeps and all(each.record for each in batch.spans)):
            return None
        return self._captured.find(batch)

    def _recorder(self, batch: Batch, captured: CapturedPass | None) -> Recorder | None:
        if all(span.record is None for span in batch.spans):
            return None
        training = self._required_training()
        graphs = training.graph_keeper(batch) if captured is None else None
        inner = training.inner_keeper(batch) if graphs is None else None
        return Recorder(training.recordings, batch, graphs, inner)


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
