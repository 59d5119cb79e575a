"""The training half of the device: trainers, their recordings, backward slices and updates.

Joins `tandem.training`, which knows no model, to the model's layers. Invariant: a recording belongs
to an open trainer at its current revision. It is closed when that revision ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tandem.config import LearningConfig
from tandem.core.errors import AccountingError, AdapterError, NoMemory
from tandem.core.plan import (
    BackwardSlice,
    Discard,
    KeptLayers,
    OpenMicroBatch,
    Span,
    Update,
    UpdateResult,
    working_key,
)
from tandem.core.ports import Urgent, never
from tandem.core.training import TrainerSpec, TrainerState
from tandem.executor.batch import Batch
from tandem.executor.device import RunAhead, mark, wait_for
from tandem.executor.graphs import GraphKeeper, graph_keeper
from tandem.executor.inner import InnerKeeper, inner_arena, inner_keeper
from tandem.executor.kv_storage import free_memory_bytes, lazy_zeros
from tandem.executor.replay import LoraReplay, Working, as_lora, within
from tandem.executor.shortage import reason_of, shortage_told
from tandem.executor.starts import make_start, trainable_prefixes
from tandem.executor.submitted import RunningSlice
from tandem.model.attention.dense import DenseContext
from tandem.model.gradient_rows import gradient_kernels
from tandem.model.layer_gradient import Inner, LayerGradients, inner_room, joined_numbers
from tandem.model.load import LoadedModel
from tandem.model.lora import Segment
from tandem.model.transfer import to_device
from tandem.training.checkpoint import Checkpoint
from tandem.training.layerwise import run_slice, slice_problem
from tandem.training.parameters import Pair, ParameterLayout
from tandem.training.recordings import Recording, Recordings
from tandem.training.trainer import Start, Trainer

logger = logging.getLogger(__name__)

# Share of free memory for recordings, the same again for trainers, and again for graphs. Graphs may
# have more of a GPU's: it is taken at the start, so a shortage shows then. The number of recording
# tokens has a limit too: more are never needed.
_RECORDING_SHARE = 0.1
_DEVICE_GRAPH_SHARE = 0.25
_MOST_RECORDING_TOKENS = 1 << 17
_FAILURES = (RuntimeError, MemoryError, ValueError, IndexError)


class TrainingState:
    """All trainers of one device. Usable only if the model has a layer stack."""

    def __init__(
        self,
        model: LoadedModel,
        arena: Tensor,
        max_rank: int,
        graph_budget: int,
        trainer_budget: int,
    ) -> None:
        """`arena` is [layers, recording tokens, width]; its rows are written when recorded. Graphs
        may take `graph_budget` bytes, and everything that trainers keep `trainer_budget` bytes."""
        self._model = model
        self._max_rank = max_rank
        self._trainer_budget = trainer_budget
        self._trainers: dict[str, Trainer] = {}
        self._working: dict[str, Working] = {}
        self._kernels = gradient_kernels(model.device, model.dtype)
        self.arena = arena  # where a captured pass records
        # Likewise for the inner activations of its first rows.
        self.inner_arena = (
            inner_arena(model, arena.shape[1], graph_budget) if self._kernels is not None else None
        )
        self.recordings = Recordings(arena, graph_budget, self.inner_arena)

    def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """See `Executor`. An open trainer of that name is closed when the new one is ready.

        Raises `NoMemory` if it would fit with others closed.
        """
        return self.read_trainer(spec)()

    def read_trainer(self, spec: TrainerSpec) -> Callable[[], TrainerState]:
        """See `Executor`."""
        if not spec.name:
            raise AdapterError("a trainer needs a name", param="name")
        with _opening(spec.name):
            admit = partial(self._require_memory, spec.name)
            start = make_start(self._model, spec, self._max_rank, admit)
        return partial(self._open_trainer, spec, start)

    def _open_trainer(self, spec: TrainerSpec, start: Start) -> TrainerState:
        """Checks the memory again, since other trainers may have been opened meanwhile."""
        with _opening(spec.name):
            self._require_memory(spec.name, start.layout)
            trainer = Trainer(spec, start, self._model.source)
            self.close_trainer(spec.name)
            self._trainers[spec.name] = trainer
            try:
                self._refresh(trainer)
            except BaseException:
                self.close_trainer(spec.name)
                raise
        return trainer.state

    def close_trainer(self, name: str) -> None:
        """See `Executor`."""
        if self._trainers.pop(name, None) is None:
            return
        self._close_recordings(name)
        self._working.pop(name, None)
        self._model.lora.drop(working_key(name))

    def snapshot_trainer(self, name: str) -> Checkpoint:
        """See `Executor`."""
        trainer = self._trainers.get(name)
        if trainer is None:
            raise AdapterError(f"trainer {name} is not open")
        with shortage_told(f"trainer {name}"):
            return trainer.snapshot()

    def gradients(self, name: str) -> Mapping[str, Pair]:
        """Gradients that an open trainer has accumulated since its last update, by module."""
        return self._trainers[name].gradients()

    def discard(self, plan: Discard) -> None:
        """Drop recordings, and the gradients that their trainer has accumulated."""
        for micro_batch in plan.micro_batches:
            self.recordings.close(micro_batch)
        trainer = self._trainers.get(plan.trainer)
        if trainer is not None:
            trainer.drop_gradients()

    def open_micro_batch(self, plan: OpenMicroBatch) -> None:
        """Allocate a recording. If that fails, the spans and slices that need it report it."""
        trainer = self._trainers.get(plan.trainer)
        if trainer is None or trainer.revision != plan.revision:
            logger.warning("micro-batch %d is of another revision", plan.micro_batch)
            return
        try:
            self.recordings.open(plan)
        except _FAILURES:
            logger.exception("micro-batch %d cannot be opened", plan.micro_batch)

    def span_problem(self, span: Span) -> str | None:
        """Why a span cannot be recorded, or None."""
        target = span.record
        if target is None:
            return None
        recording = self.recordings.get(target.micro_batch)
        if recording is None:
            return f"micro-batch {target.micro_batch} is not open"
        if span.adapter != working_key(recording.trainer):
            return f"micro-batch {target.micro_batch} belongs to trainer {recording.trainer}"
        if not 0 <= target.sequence < len(recording.lengths):
            return f"micro-batch {target.micro_batch} has no sequence {target.sequence}"
        if span.start > recording.done[target.sequence]:
            return f"rows before {span.start} of the sequence were not recorded"
        if span.end > recording.lengths[target.sequence]:
            return f"the sequence was opened with {recording.lengths[target.sequence]} rows"
        if recording.at != self.recordings.num_layers:
            return f"the backward pass of micro-batch {target.micro_batch} has begun"
        return None

    def graph_keeper(self, batch: Batch) -> GraphKeeper | None:
        """Computes the layers of a pass that only records; None if graphs cannot be kept."""
        return graph_keeper(self.recordings, batch, self._prepare)

    def inner_keeper(self, batch: Batch) -> InnerKeeper | None:
        """Keeps the inner layers of a pass through the model's own layers; None if it cannot."""
        stack = self._model.stack
        assert stack is not None
        return inner_keeper(
            self.recordings,
            batch,
            lambda layer, rows: inner_room(stack.taps[layer].module, rows),
            self.inner_arena,
        )

    def kept(self, spans: Sequence[Span]) -> tuple[KeptLayers, ...]:
        """What is kept of the micro-batches that `spans` recorded."""
        numbers = dict.fromkeys([s.record.micro_batch for s in spans if s.record is not None])
        found = [each for number in numbers if (each := self.recordings.get(number)) is not None]
        return tuple([self._kept(recording) for recording in found])

    def run_slice(
        self, plan: BackwardSlice, urgent: Urgent = never, ahead: RunAhead | None = None
    ) -> RunningSlice | None:
        """Give a slice to the device. The last one of its micro-batch closes the recording.

        It ends between two layers if something is `urgent`: with `ahead`, only few layers were
        given by then. None if that is so before the first.
        """
        device = self._model.device
        began = mark(device)
        recording = self.recordings.get(plan.micro_batch)
        problem = slice_problem(recording, plan, self.recordings.num_layers)
        if problem is not None:
            return RunningSlice(plan.micro_batch, plan.hi, plan.lo, problem, began, began)
        assert recording is not None
        # Without recorded inputs, every slice computes all layers below it again.
        dropped = recording.first_row is None
        at_once = plan.hi - plan.lo if dropped or urgent is never else 1
        lo = plan.hi
        while lo > plan.lo and problem is None and not urgent():
            problem = self._run_layers(recording, replace(plan, hi=lo, lo=lo - at_once))
            lo -= at_once
            if ahead is not None:
                ahead.given()
        if lo == plan.hi:
            return None
        return RunningSlice(plan.micro_batch, plan.hi, lo, problem, began, mark(device))

    def _run_layers(self, recording: Recording, plan: BackwardSlice) -> str | None:
        """Give layers to the device. Returns why they cannot be computed, if so."""
        try:
            found = run_slice(self.recordings, recording, plan, self._replay)
            self._trainers[recording.trainer].accumulate(found)
        except _FAILURES as error:
            logger.exception("a backward slice failed")
            return reason_of(error, "the backward pass")
        if plan.lo == 0:
            self.recordings.close(plan.micro_batch)
        return None

    def run_update(self, plan: Update) -> UpdateResult:
        """Optimiser step. Closes remaining recordings of the old revision."""
        started = time.perf_counter()
        trainer = self._trainers.get(plan.trainer)
        if trainer is None or trainer.revision != plan.revision:
            at = trainer.revision if trainer is not None else plan.revision
            problem = f"trainer {plan.trainer} is not at revision {plan.revision}"
            return UpdateResult(plan.trainer, at, False, 0.0, 0.0, 0.0, problem)
        applied = trainer.update(plan.scale)
        failure = None if applied.applied else "the gradient was not finite"
        if applied.applied:
            self._close_recordings(plan.trainer)
            try:
                self._refresh(trainer)
            except _FAILURES as error:
                logger.exception(
                    "the parameters of trainer %s cannot be given to passes", plan.trainer
                )
                failure = reason_of(error, "the update")
        wait_for(self._model.device)
        return UpdateResult(
            plan.trainer,
            trainer.revision,
            failure is None,
            applied.grad_norm,
            applied.learning_rate,
            time.perf_counter() - started,
            failure,
        )

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by purpose."""
        masters = sum(each.nbytes for each in self._trainers.values())
        joined = sum(each.gradients.nbytes for each in self._working.values())
        return {
            "recordings": self.recordings.nbytes,
            "graphs": self.recordings.graph_bytes,
            "trainers": masters + self.working_bytes + joined,
        }

    @property
    def working_bytes(self) -> int:
        """Bytes of the working copies that forward passes read. `LoraLayers` counts them too."""
        return sum(
            weights.a.nbytes + weights.b.nbytes
            for working in self._working.values()
            for weights in working.adapter.values()
        )

    def check(self) -> None:
        """Account for every recorded row and for the trainers. Raises `AccountingError`."""
        self.recordings.check(self._trainers.__contains__)
        taken = self.memory_bytes()["trainers"]
        if taken > self._trainer_budget:
            raise AccountingError(f"trainers take {taken} of {self._trainer_budget} bytes")

    def _require_memory(self, name: str, layout: ParameterLayout) -> None:
        """Raise an error if memory may not suffice. Every trainer counts with its maximum."""
        needed, budget = self._most_bytes(layout), self._trainer_budget
        open_now = list(self._trainers.items())  # a copy, since the loop's thread may change it
        others = [each.layout for key, each in open_now if key != name]
        advice = "choose a lower rank or fewer targets, or raise learning.trainer_bytes"
        if needed > budget:
            raise AdapterError(
                f"training it takes {needed} bytes and trainers may have {budget}: {advice}",
                param="rank",
            )
        taken = sum(self._most_bytes(other) for other in others)
        if taken + needed > budget:
            raise NoMemory(
                f"training it takes {needed} bytes, and {len(others)} open trainers need {taken} "
                f"of {budget}: wait for one of them, or {advice}",
                param="rank",
            )

    def _most_bytes(self, layout: ParameterLayout) -> int:
        """Parameters, gradient and AdamW's two moments in float32, the working copy, and what a
        backward joins of it."""
        joined = 0
        if self._kernels is not None and self._model.stack is not None:
            ranks = {name: shape.rank for name, shape in layout.modules.items()}
            taps = self._model.stack.taps
            for prefix, tap in zip(trainable_prefixes(self._model), taps, strict=True):
                joined += joined_numbers(tap.module, within(prefix, ranks))
        masters = layout.size * 4 * torch.float32.itemsize
        return masters + (layout.size + joined) * self._model.dtype.itemsize

    def _refresh(self, trainer: Trainer) -> None:
        """Give forward passes the current parameters, in new tensors."""
        pairs = trainer.working_copy(self._model.dtype)
        adapter = as_lora(pairs, trainer.layout)
        by_layer = [within(prefix, adapter) for prefix in trainable_prefixes(self._model)]
        working = Working(adapter, by_layer, LayerGradients(by_layer, self._kernels))
        self._working[trainer.spec.name] = working
        self._model.lora.add(working_key(trainer.spec.name), adapter)

    def _kept(self, recording: Recording) -> KeptLayers:
        layers = self.recordings.num_layers
        inner = sum([isinstance(graph, Inner) for graph in recording.graphs.values()])
        whole = len(recording.graphs) - inner
        return KeptLayers(recording.micro_batch, whole / layers, inner / layers)

    def _close_recordings(self, trainer: str) -> None:
        for recording in self.recordings.of(trainer):
            self.recordings.close(recording.micro_batch)

    def _prepare(self, recording: Recording) -> LoraReplay:
        lengths = [length for length in recording.lengths if length]
        replay = self._replay(recording.trainer, recording.tokens, lengths)
        recording.replay = replay
        return replay

    def _replay(self, trainer: str, tokens: Tensor, lengths: Sequence[int]) -> LoraReplay:
        positions = torch.cat([torch.arange(length) for length in lengths])
        assert self._model.stack is not None
        replay = self._model.stack.replay(
            tokens, to_device(positions, tokens.device), DenseContext(lengths)
        )
        segment = Segment(working_key(trainer), 0, len(tokens))
        return LoraReplay(self._model, replay, segment, self._working[trainer])


def training_state(
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
    free = free_memory_bytes(model.device)
    graphs = _DEVICE_GRAPH_SHARE if model.device.type == "cuda" else _RECORDING_SHARE
    return TrainingState(
        model,
        arena,
        max_rank,
        graph_budget=min(learning.graph_bytes, int(free * graphs)),
        trainer_budget=learning.trainer_bytes or int(free * _RECORDING_SHARE),
    )


@contextmanager
def _opening(name: str) -> Iterator[None]:
    """Errors while a trainer is made become `NoMemory` or `AdapterError`."""
    try:
        with shortage_told(f"trainer {name}"):
            yield
    except (MemoryError, RuntimeError) as error:
        raise AdapterError(f"cannot open trainer {name}: {error}") from error
