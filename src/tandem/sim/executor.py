"""An executor that computes nothing and takes as long as the profile says.

Every plan advances the virtual clock by its predicted time, with noise drawn from the profile's
residuals. Every iteration also takes the loop's own time (`host_s`). Tokens are numbers that depend
on sequence and position only. Invariant: the same plans in the same order give the same times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from random import Random

from tandem.core.clock import VirtualClock
from tandem.core.errors import AdapterError
from tandem.core.events import ModelInfo
from tandem.core.plan import (
    BackwardSlice,
    DrawResult,
    KeptLayers,
    LanePlan,
    OpenMicroBatch,
    ScoreResult,
    SliceResult,
    Span,
    StepResult,
    UpdateResult,
)
from tandem.core.ports import EndDraws, TrainerSnapshot, Urgent, never
from tandem.core.sampling import Grammar
from tandem.core.training import TrainerSpec, TrainerState
from tandem.core.version import AdapterVersion
from tandem.estimators.calibrate import kind_of
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import Profile
from tandem.estimators.work import BackwardWork, PassWork
from tandem.sim.curves import Curve

_STRIDE = 7919  # a prime: neighbouring sequences draw different tokens
# A pass with warm caches takes at least this share of what the rates say.
_LEAST_WARM = 0.5


@dataclass(slots=True)
class _Trainer:
    revision: int = 0


class SimExecutor:
    """Implements `tandem.core.ports.Executor` on a virtual clock.

    `beta` relates a curve's margin to log-probabilities. `on_plan` is called with every plan and
    its result, after its time has passed.
    """

    runs_ahead = False

    def __init__(
        self,
        profile: Profile,
        clock: VirtualClock,
        *,
        curve: Curve,
        beta: float = 0.1,
        noise: bool = True,
        seed: int = 0,
        on_plan: Callable[[LanePlan, StepResult], None] | None = None,
    ) -> None:
        # There is no text, so draws follow no grammar.
        self.compile_grammar: Callable[[Grammar], EndDraws] = lambda grammar: lambda seq_ids: None
        self._profile = profile
        self._clock = clock
        self._latency = LatencyModel(profile.rates)
        self._curve = curve
        self._beta = beta
        self._noise = profile.noise if noise else {}
        self._on_plan = on_plan
        self._rng = Random(seed)
        self._ended_s = clock.now() - 1.0  # so the first pass comes after a sleep
        self._step = -1  # of the last plan
        self._cold = 1.0  # share of the caches' saving that the next pass lacks
        self._open: dict[int, OpenMicroBatch] = {}
        self._first: dict[int, int] = {}  # place of a recording's first sequence
        self._backward: dict[int, BackwardWork] = {}
        self._trainers: dict[str, _Trainer] = {}
        self._results: list[StepResult] = []

    @property
    def info(self) -> ModelInfo:
        """The model of the profile."""
        return self._profile.info

    @property
    def host_s(self) -> float:
        """Seconds of an iteration beside its work, from the profile."""
        return self._profile.host_s

    def submit(self, plan: LanePlan, urgent: Urgent = never) -> int:
        """Advance the clock by the time of `plan`, layer by layer if it is preemptible.

        On a share of the device all work takes longer in proportion, whether bound by memory or
        not.
        """
        stop = urgent if plan.preemptible else never
        for discard in plan.discards:
            for number in discard.micro_batches:
                self._forget(number)
        before: Counter[str] = Counter()  # one plan opens all parts of a micro-batch
        for opened in plan.opens:
            self._open[opened.micro_batch] = opened
            self._first[opened.micro_batch] = before[opened.trainer]
            before[opened.trainer] += len(opened.lengths)
            self._backward[opened.micro_batch] = BackwardWork.of(opened.lengths)
        work = PassWork.of(plan)
        began_s, seconds = self._clock.now(), self.seconds_of(work) / plan.share
        pieces = self.info.num_layers + 1 if stop is not never else 1  # one is the head
        stopped, done = self._spend([seconds / pieces] * pieces, stop) < pieces, plan
        if stopped:
            done = replace(plan, spans=(), slices=(), updates=())
        forward_s = self._clock.now() - began_s if stopped else seconds
        self._latency.after(forward_s)
        vocabulary = self.info.vocab_size
        draws = tuple(
            [
                DrawResult(draw.seq_id, (draw.seq_id * _STRIDE + draw.position) % vocabulary)
                for span in done.spans
                for draw in span.draws
            ]
        )
        scores = tuple([self._score(span) for span in done.spans if span.score_targets])
        kept = self._keep(done.spans)
        slices = self._slices(done.slices, stop, plan.share)
        due = takewhile(lambda _: not stop(), done.updates)
        updates = tuple([self._update(each.trainer, plan.share) for each in due])
        if slices or updates or work.recorded:
            self._cold = 1.0
        elapsed_s = self._clock.now() - began_s
        result = StepResult(
            plan.step, plan.lane, elapsed_s, draws, scores, (), forward_s, slices, updates, kept,
            stopped,
        )  # fmt: skip
        if self._on_plan is not None:
            self._on_plan(plan, result)
        self._results.append(result)
        if self.host_s and plan.step != self._step:  # else it is another lane of the same iteration
            self._clock.advance(self.host_s)
        self._step, self._ended_s = plan.step, self._clock.now()
        return plan.step

    def poll(self) -> list[StepResult]:
        """Results of all plans since the last call."""
        results, self._results = self._results, []
        return results

    def seconds_of(self, work: PassWork) -> float:
        """Seconds of a pass, noise included, as `submit` would draw them. The first pass after a
        pause takes longer. Successive passes without training take less and less."""
        if not work.tokens:
            return 0.0
        caches, now, resume_s = self._profile.caches, self._clock.now(), 0.0
        if now != self._ended_s:
            self._ended_s, self._cold, resume_s = now, 1.0, caches.resume_s
            self._latency.after(math.inf)
        cold_s = self._latency.forward_s(work)
        saved_s = (caches.prompt_s if work.rows else caches.decode_s) * (1.0 - self._cold)
        seconds = max(_LEAST_WARM * cold_s, cold_s - saved_s)
        self._cold *= caches.cold_share
        if self._noise:
            seconds = self._noisy(seconds, kind_of(work))
        self._latency.after(seconds + resume_s)
        return seconds + resume_s

    def work_until(self, now_s: float) -> None:
        """Advance the clock over a leap."""
        self._clock.advance_to(now_s)
        self._ended_s = now_s

    def token_of(self, seq_id: int, position: int) -> int:
        """The token that a sequence draws at an output position."""
        return (seq_id * _STRIDE + position) % self.info.vocab_size

    def read_adapter(self, version: AdapterVersion) -> Callable[[], None]:
        """There is nothing to load."""
        return lambda: None

    def drop_adapter(self, content_hash: str) -> None:
        """There is nothing to drop."""

    def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """A trainer without parameters."""
        self._trainers[spec.name] = _Trainer()
        return TrainerState(spec.name, 0, 0)

    def read_trainer(self, spec: TrainerSpec) -> Callable[[], TrainerState]:
        """There is nothing to read."""
        return lambda: self.open_trainer(spec)

    def close_trainer(self, name: str) -> None:
        """Forget a trainer and its recordings."""
        self._trainers.pop(name, None)
        for number in [number for number, each in self._open.items() if each.trainer == name]:
            self._forget(number)

    def snapshot_trainer(self, name: str) -> TrainerSnapshot:
        """There are no parameters to copy. Raises `AdapterError`."""
        raise AdapterError("a simulated trainer has no parameters to save")

    def adopt(self, snapshot: TrainerSnapshot, content_hash: str) -> None:
        """There is nothing to adopt."""

    def memory_bytes(self) -> Mapping[str, int]:
        """Rows that are recorded; nothing else takes memory."""
        return {"recorded_rows": sum(sum(each.lengths) for each in self._open.values())}

    def _noisy(self, seconds: float, kind: str) -> float:
        residuals = self._noise.get(kind) or self._noise.get("pass")
        return seconds * max(0.1, 1.0 + self._rng.choice(residuals)) if residuals else seconds

    def _score(self, span: Span) -> ScoreResult:
        """Chosen and rejected sequences alternate. Their difference is the curve's margin."""
        total = -1.0 * sum([target >= 0 for target in span.score_targets])
        if span.record is not None:
            opened, place = self._open[span.record.micro_batch], span.record.sequence
            margin = self._curve.margin(self._trainers[opened.trainer].revision)
            half = margin / self._beta / 2.0
            whole_place = self._first[opened.micro_batch] + place
            total = half if whole_place % 2 == 0 else -half
            if span.end < opened.lengths[place]:  # the last chunk has the whole sum
                total = 0.0
        return ScoreResult(span.seq_id, span.start, (), total)

    def _keep(self, spans: tuple[Span, ...]) -> tuple[KeptLayers, ...]:
        """What the profiled device keeps: one share of layers for passes of nothing but whole
        micro-batches, another for other passes."""
        rows: Counter[int] = Counter()
        for span in spans:
            if span.record is not None:
                rows[span.record.micro_batch] += len(span.tokens)
        alone = all(span.record is not None for span in spans)
        alone = alone and all(self._backward[each].rows == count for each, count in rows.items())
        shares = self._profile.kept_alone if alone else self._profile.kept_beside
        found = tuple([KeptLayers(number, *shares) for number in rows])
        for kept in found:
            self._backward[kept.micro_batch] = self._backward[kept.micro_batch].with_kept(kept)
        return found

    def _spend(self, pieces_s: Sequence[float], urgent: Urgent) -> int:
        """Advance the clock piece by piece until something is urgent; how many pieces ran."""
        if urgent is never:
            self._clock.advance(sum(pieces_s))
            return len(pieces_s)
        for done, seconds in enumerate(pieces_s):
            if seconds and urgent():
                return done
            self._clock.advance(seconds)
        return len(pieces_s)

    def _slices(
        self, plans: tuple[BackwardSlice, ...], urgent: Urgent, share: float
    ) -> tuple[SliceResult, ...]:
        found: list[SliceResult] = []
        for plan in plans:
            work, began_s = self._backward[plan.micro_batch], self._clock.now()
            layers = plan.hi - plan.lo
            predicted_s = self._latency.slice_s(work, layers)
            seconds = self._noisy(predicted_s, "slice") / share
            pieces_s = [seconds]
            if urgent is not never:  # the first layer has the slice's fixed cost
                upto_s = [self._latency.slice_s(work, n) for n in range(layers + 1)]
                part = seconds / predicted_s
                pieces_s = [part * (after - before) for before, after in pairwise(upto_s)]
            done = self._spend(pieces_s, urgent)
            if not done:
                continue
            lo = plan.hi - done if done < len(pieces_s) else plan.lo
            elapsed_s = seconds if lo == plan.lo else self._clock.now() - began_s
            self._backward[plan.micro_batch] = work.after_slice()
            if lo == 0:
                self._forget(plan.micro_batch)
            found.append(SliceResult(plan.micro_batch, plan.hi, lo, elapsed_s))
        return tuple(found)

    def _update(self, name: str, share: float) -> UpdateResult:
        trainer, seconds = self._trainers[name], self._latency.update_s() / share
        trainer.revision += 1
        self._clock.advance(seconds)
        return UpdateResult(name, trainer.revision, True, 1.0, 1e-4, seconds)

    def _forget(self, number: int) -> None:
        for numbered in (self._open, self._first, self._backward):
            numbered.pop(number, None)
