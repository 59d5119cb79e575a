"""An executor without a model: KV is a chain of hashes, the next token a function of it.

Each cache slot holds (position, token, weights, hash of the prefix under those weights). A span
whose blocks do not hold exactly its own prefix, written under its own weights, fails at once; and
since the drawn token depends on the whole prefix, any mix-up also changes the answer.

A trainer's weights are a number that changes with each update. Every rule of `core.plan` about
recordings, slices and updates is asserted. With a clock, work takes the time that `Costs` says.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakSet

from msgspec import structs

from fake_answers import VOCAB, draw_of, link, logprob_of
from tandem.core.clock import VirtualClock
from tandem.core.errors import AdapterError, InvalidRequest
from tandem.core.events import ModelInfo
from tandem.core.plan import (
    UNDRAWN,
    BackwardSlice,
    Draw,
    DrawResult,
    LanePlan,
    OpenMicroBatch,
    ScoreResult,
    SliceResult,
    Span,
    StepResult,
    TokenLogprob,
    Update,
    UpdateResult,
    working_key,
)
from tandem.core.ports import EndDraws, Executor, TrainerSnapshot, Urgent, never
from tandem.core.sampling import Grammar
from tandem.core.training import TrainerSpec, TrainerState
from tandem.core.version import AdapterVersion

EOS = 7
LAYERS = 3
Slot = tuple[int, int, str | None, int]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that work takes on the fake device."""

    iteration_s: float = 0.0
    token_s: float = 0.0
    slice_s: float = 0.0
    layer_token_s: float = 0.0
    update_s: float = 0.0


@dataclass
class FakeRecording:
    """A micro-batch: how many rows of each sequence are there, how many layers are left."""

    opened: OpenMicroBatch
    rows: list[int]
    layers_left: int = LAYERS
    coefficients: tuple[float, ...] | None = None


@dataclass
class FakeTrainer:
    """Working parameters (`weights`) and the gradients since their last update."""

    spec: TrainerSpec
    revision: int = 0
    weights: int = 0
    gradients: list[tuple[float, ...]] = field(default_factory=list)
    broken: bool = False


class FakeSnapshot:
    """See `TrainerSnapshot`. The files hold the weights and the revision."""

    def __init__(self, trainer: FakeTrainer) -> None:
        self.state = _state(trainer)
        self.weights = trainer.weights

    def write(self, path: str) -> None:
        folder = Path(path)
        try:
            folder.mkdir()
        except OSError as error:
            raise AdapterError(f"cannot write {path}: {error}") from error
        (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
        (folder / "adapter_model.safetensors").write_bytes(f"weights {self.weights}".encode())
        state = {"revision": self.state.revision, "weights": self.weights}
        (folder / "optimizer.json").write_text(json.dumps(state))


class CompiledGrammar:
    """One that the loop holds, and the sequences that it was told have ended."""

    def __init__(self) -> None:
        self.ended: list[int] = []

    def end(self, seq_ids: Iterable[int]) -> None:
        self.ended.extend(seq_ids)


class FakeExecutor:
    """See the module. `on_submit` sees every plan first (to count, or to raise).

    A sequence may read KV of the weights that `earlier` says, beside its own. Sequences in
    `failing` (for the reason `fails_for`), micro-batches in `failing_slices` and trainers in
    `failing_updates` fail; `nan_scores` makes the sums of these sequences nan.

    With `runs_ahead`, the results of a plan may be polled when the one that follows was submitted.
    Draws for which `redraws` is true are other tokens on the device than in the results.
    """

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 4,
        max_model_len: int = 64,
        on_submit: Callable[[LanePlan], None] = lambda plan: None,
        recording_tokens: int = 64,
        clock: VirtualClock | None = None,
        costs: Costs = Costs(),
    ) -> None:
        self.info = ModelInfo(
            model="fake", architecture="FakeForCausalLM", device="none", dtype="none",
            vocab_size=VOCAB, max_model_len=max_model_len, eos_token_ids=(EOS,),
            block_size=block_size, num_blocks=num_blocks, num_parameters=0, weight_bytes=0,
            kernels="none", num_layers=LAYERS, recording_tokens=recording_tokens,
        )  # fmt: skip
        self.runs_ahead = False
        self.redraws: Callable[[Draw], bool] = lambda draw: False
        self._drawn: dict[int, int] = {}  # on the device, by the last plan
        self.adapters: set[str] = set()
        self.earlier: Callable[[int], set[str]] = lambda seq_id: set()
        self.failing: set[int] = set()
        self.fails_for = "asked to fail"
        self.nan_scores: set[int] = set()
        self.failing_slices: set[int] = set()
        self.wrong_grammars: set[Grammar] = set()
        self.ready_grammars: WeakSet[CompiledGrammar] = WeakSet()
        self.failing_updates: set[str] = set()
        self.trainers: dict[str, FakeTrainer] = {}
        self.recordings: dict[int, FakeRecording] = {}
        self._used_numbers: set[int] = set()
        self._on_submit = on_submit
        self._clock = clock
        self._costs = costs
        self._slots: dict[tuple[int, int], Slot] = {}
        self._results: list[tuple[LanePlan, StepResult]] = []

    # ------------------------------------------------------------------ plans

    def submit(self, plan: LanePlan, urgent: Urgent = never) -> int:  # noqa: C901
        self._on_submit(plan)
        if plan.follows:
            plan = self._with_tokens(plan)
        stop = urgent if plan.preemptible else never
        for discard in plan.discards:
            self._discard(discard.trainer, discard.micro_batches)
        for opened in plan.opens:
            self._open(opened)
        for copy in plan.copies:
            for offset in range(self.info.block_size):
                slot = self._slots.get((copy.source, offset))
                if slot is not None:
                    self._slots[copy.target, offset] = slot
        forward_s = self._costs.iteration_s + self._costs.token_s * plan.num_tokens
        forward_s, stopped = self._pass(forward_s if plan.spans else 0.0, stop)
        if stopped:
            plan = replace(plan, spans=(), slices=(), updates=())
        draws: list[DrawResult] = []
        scores: list[ScoreResult] = []
        for span in plan.spans:
            self._write(span)
        for span in plan.spans:
            chain, found = self._read(span)
            draws += [self._draw(chain, draw) for draw in span.draws]
            if span.score_targets:
                scores.append(self._score(span, found))
            if span.record is not None:
                self._record(span)
        slices = [done for piece in plan.slices if (done := self._layers(piece, stop))]
        updates = () if stop() else tuple([self._update(update) for update in plan.updates])
        failed = tuple((s.seq_id, self.fails_for) for s in plan.spans if s.seq_id in self.failing)
        self._drawn = {draw.seq_id: 0 if draw.redrawn else draw.token for draw in draws}
        self._results.append((plan, StepResult(
                plan.step,
                plan.lane,
                forward_s + sum(s.elapsed_s for s in slices) + sum(u.elapsed_s for u in updates),
                tuple(draws),
                tuple(scores),
                failed,
                forward_s,
                tuple(slices),
                updates,
                stopped=stopped,
            ))
        )  # fmt: skip
        return plan.step

    def poll(self) -> list[StepResult]:
        results, self._results = self._results, []
        if len(results) > 1 and results[-1][0].follows:
            self._results = [results.pop()]
        return [result for _, result in results]

    def _with_tokens(self, plan: LanePlan) -> LanePlan:
        """A plan that follows, with what the one before has drawn."""
        assert self.runs_ahead and all(span.tokens == (UNDRAWN,) for span in plan.spans)
        spans = [structs.replace(s, tokens=(self._drawn[s.seq_id],)) for s in plan.spans]
        return replace(plan, spans=tuple(spans))

    def _draw(self, chain: int, draw: Draw) -> DrawResult:
        drawn = draw_of(chain, draw)
        return structs.replace(drawn, redrawn=self.redraws(draw))

    # ------------------------------------------------------------------ adapters and trainers

    def compile_grammar(self, grammar: Grammar) -> EndDraws:
        if grammar in self.wrong_grammars:
            raise InvalidRequest("the grammar is wrong", param=grammar.param)
        ready = CompiledGrammar()
        self.ready_grammars.add(ready)
        return ready.end

    def read_adapter(self, version: AdapterVersion) -> Callable[[], None]:
        return lambda: self.adapters.add(version.content_hash)

    def drop_adapter(self, content_hash: str) -> None:
        self.adapters.remove(content_hash)

    def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        assert spec.name not in self.trainers, "the one before must be closed first"
        trainer = FakeTrainer(spec, weights=spec.lora.seed)
        if spec.source:
            saved = Path(spec.source) / "optimizer.json"
            if saved.is_file():
                state = json.loads(saved.read_text())
                trainer.revision, trainer.weights = state["revision"], state["weights"]
            elif spec.resume:
                raise AdapterError(f"{spec.source} has no optimiser state")
        self.trainers[spec.name] = trainer
        return _state(trainer)

    def read_trainer(self, spec: TrainerSpec) -> Callable[[], TrainerState]:
        return lambda: self.open_trainer(spec)

    def close_trainer(self, name: str) -> None:
        if self.trainers.pop(name, None) is not None:
            for number, recording in list(self.recordings.items()):
                if recording.opened.trainer == name:
                    del self.recordings[number]

    def snapshot_trainer(self, name: str) -> FakeSnapshot:
        if name not in self.trainers:
            raise AdapterError(f"there is no trainer {name}")
        return FakeSnapshot(self.trainers[name])

    def adopt(self, snapshot: TrainerSnapshot, content_hash: str) -> None:
        self.adapters.add(content_hash)

    def memory_bytes(self) -> Mapping[str, int]:
        return {"recordings": sum(sum(r.opened.lengths) for r in self.recordings.values())}

    # ------------------------------------------------------------------ forward

    def _pass(self, seconds: float, urgent: Urgent) -> tuple[float, bool]:
        """Spend the time of a pass, a layer's at a time; how much, and whether it gave way."""
        spent_s, pieces = 0.0, 1 if urgent is never else LAYERS + 1  # the head is one
        for _ in range(pieces):
            if seconds and urgent():
                return spent_s, True
            spent_s += self._spend(seconds / pieces)
        return seconds, False

    def _place(self, span: Span, position: int) -> tuple[int, int]:
        size = self.info.block_size
        return span.block_tables[0][position // size], position % size

    def _weights(self, adapter: str | None) -> str | None:
        """What the KV depends on: a content hash, or working parameters as they are now."""
        for name, trainer in self.trainers.items():
            if adapter == working_key(name):
                return f"{adapter}#{trainer.weights}"
        assert adapter is None or adapter in self.adapters, "adapter is not loaded"
        return adapter

    def _write(self, span: Span) -> None:
        weights = self._weights(span.adapter)
        chain = self._slots[self._place(span, span.start - 1)][3] if span.start else 0
        for row, token in enumerate(span.tokens):
            position = span.start + row
            chain = link(chain, token, weights)
            self._slots[self._place(span, position)] = (position, token, weights, chain)

    def _read(self, span: Span) -> tuple[int, list[int]]:
        """The chain after the last row, and after each of the span's rows."""
        weights = self._weights(span.adapter)
        chain = 0
        chains = []
        for position in range(span.end):
            at, token, adapter, stored = self._slots[self._place(span, position)]
            assert at == position, f"position {position} reads KV of position {at}"
            allowed = adapter == weights or adapter in self.earlier(span.seq_id)
            assert allowed, f"KV of {adapter} read under {weights}"
            chain = link(chain, token, adapter)
            assert chain == stored, f"position {position} reads KV of another prefix"
            chains.append(chain)
        assert self._slots[self._place(span, span.end - 1)][1] == span.tokens[-1]
        return chain, chains[span.start :]

    def _score(self, span: Span, chains: list[int]) -> ScoreResult:
        assert len(span.score_targets) in (len(span.tokens), len(span.tokens) - 1)
        found = tuple(
            TokenLogprob(target, logprob_of(chain, target), 1)
            for chain, target in zip(chains, span.score_targets, strict=False)
            if target >= 0
        )
        total = sum(each.logprob for each in found)
        if span.seq_id in self.nan_scores:
            total = math.nan
        return ScoreResult(span.seq_id, span.start, () if span.score_top is None else found, total)

    def _record(self, span: Span) -> None:
        assert span.record is not None
        recording = self.recordings[span.record.micro_batch]
        trainer = self.trainers[recording.opened.trainer]
        assert span.adapter == working_key(trainer.spec.name)
        assert recording.opened.revision == trainer.revision, "forward at another revision"
        place = span.record.sequence
        assert recording.rows[place] == span.start, "rows are recorded once and in order"
        recording.rows[place] = span.end
        assert span.end <= recording.opened.lengths[place]
        assert recording.layers_left == LAYERS, "recorded after its backward began"

    # ------------------------------------------------------------------ backward

    def _open(self, opened: OpenMicroBatch) -> None:
        assert opened.micro_batch not in self._used_numbers, "a number is used once"
        self._used_numbers.add(opened.micro_batch)
        assert opened.revision == self.trainers[opened.trainer].revision
        assert opened.lengths and min(opened.lengths) > 0
        self.recordings[opened.micro_batch] = FakeRecording(opened, [0] * len(opened.lengths))
        rows = sum(sum(r.opened.lengths) for r in self.recordings.values())
        assert rows <= self.info.recording_tokens, "more is recorded than there is room for"

    def _discard(self, name: str, numbers: tuple[int, ...]) -> None:
        self.trainers[name].gradients.clear()
        self.trainers[name].broken = False
        for number in numbers:
            recording = self.recordings.pop(number, None)
            assert recording is None or recording.opened.trainer == name

    def _layers(self, piece: BackwardSlice, urgent: Urgent) -> SliceResult | None:
        """A slice, layer by layer if something may be urgent; None if before the first one."""
        if urgent is never:
            return self._slice(piece)
        done = None
        for hi in range(piece.hi, piece.lo, -1):
            if urgent():
                break
            one = self._slice(replace(piece, hi=hi, lo=hi - 1), begun=done is not None)
            spent_s = one.elapsed_s + (done.elapsed_s if done else 0.0)
            done = replace(one, hi=piece.hi, elapsed_s=spent_s)
            if one.problem is not None:
                break
        return done

    def _slice(self, piece: BackwardSlice, begun: bool = False) -> SliceResult:
        recording = self.recordings[piece.micro_batch]
        trainer = self.trainers[recording.opened.trainer]
        assert tuple(recording.rows) == recording.opened.lengths, "not all of it is forwarded"
        assert piece.hi == recording.layers_left and 0 <= piece.lo < piece.hi
        assert len(piece.coefficients) == len(recording.opened.lengths)
        assert recording.coefficients in (None, piece.coefficients)
        recording.coefficients, recording.layers_left = piece.coefficients, piece.lo
        layers = piece.hi - piece.lo
        elapsed_s = self._spend(
            (0.0 if begun else self._costs.slice_s)
            + self._costs.layer_token_s * layers * sum(recording.opened.lengths)
        )
        if piece.micro_batch in self.failing_slices:
            trainer.broken = True
            problem = "asked to fail"
            return SliceResult(piece.micro_batch, piece.hi, piece.lo, elapsed_s, problem)
        if piece.lo == 0:
            trainer.gradients.append(piece.coefficients)
            del self.recordings[piece.micro_batch]
        return SliceResult(piece.micro_batch, piece.hi, piece.lo, elapsed_s)

    def _update(self, update: Update) -> UpdateResult:
        name, trainer = update.trainer, self.trainers[update.trainer]
        assert update.revision == trainer.revision
        elapsed_s = self._spend(self._costs.update_s)
        assert not trainer.broken, "updated although a slice failed"
        if name in self.failing_updates:
            trainer.gradients.clear()
            return UpdateResult(name, trainer.revision, False, 0.0, 0.0, elapsed_s, "left out")
        pending = [n for n, r in self.recordings.items() if r.opened.trainer == name]
        assert not pending, f"updated while micro-batches {pending} are open"
        assert trainer.gradients, "updated without gradients"
        trainer.weights = zlib.crc32(f"{trainer.weights},{trainer.gradients}".encode())
        trainer.gradients.clear()
        trainer.revision += 1
        return UpdateResult(name, trainer.revision, True, 1.0, 1e-4, elapsed_s)

    def _spend(self, seconds: float) -> float:
        if self._clock is not None:
            self._clock.advance(seconds)
        return seconds


def as_executor(executor: FakeExecutor) -> Executor:
    """The fake as its protocol (a type checker compares the two here)."""
    return executor


def _state(trainer: FakeTrainer) -> TrainerState:
    return TrainerState(trainer.spec.name, trainer.revision, 1)
