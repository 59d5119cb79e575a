"""An executor that computes nothing and takes as long as the profile says.

Every plan advances the virtual clock by its predicted time, with noise drawn from the profile's
recorded residuals. Tokens are numbers that depend on sequence and position alone. Invariant: the
same plans in the same order give the same times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from tandem.core.clock import VirtualClock
from tandem.core.errors import AdapterError
from tandem.core.events import ModelInfo
from tandem.core.plan import (
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
from tandem.core.ports import TrainerSnapshot
from tandem.core.training import TrainerSpec, TrainerState
from tandem.core.version import AdapterVersion
from tandem.estimators.calibrate import kind_of
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import Profile
from tandem.estimators.work import BackwardWork, PassWork
from tandem.sim.curves import Curve

_STRIDE = 7919  # a prime: neighbouring sequences draw different tokens


@dataclass(slots=True)
class _Trainer:
    revision: int = 0


class SimExecutor:
    """See `tandem.core.ports.Executor`.

    `beta` relates a curve's margin to log-probabilities; `on_plan` sees every plan with its result,
    when its time has passed.
    """

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
        self._profile = profile
        self._clock = clock
        self._latency = LatencyModel(profile.rates)
        self._curve = curve
        self._beta = beta
        self._noise = profile.noise if noise else {}
        self._on_plan = on_plan
        self._rng = Random(seed)
        self._ended_s = clock.now() - 1.0  # it has slept
        self._open: dict[int, OpenMicroBatch] = {}
        self._backward: dict[int, BackwardWork] = {}
        self._trainers: dict[str, _Trainer] = {}
        self._results: list[StepResult] = []

    @property
    def info(self) -> ModelInfo:
        """The profile's."""
        return self._profile.info

    def submit(self, plan: LanePlan) -> int:
        """Let the time of `plan` pass."""
        for discard in plan.discards:
            for number in discard.micro_batches:
                self._forget(number)
        for opened in plan.opens:
            self._open[opened.micro_batch] = opened
            self._backward[opened.micro_batch] = BackwardWork(sum(opened.lengths))
        forward_s = self.seconds_of(PassWork.of(plan))
        vocabulary = self.info.vocab_size
        draws = tuple(
            [
                DrawResult(draw.seq_id, (draw.seq_id * _STRIDE + draw.position) % vocabulary)
                for span in plan.spans
                for draw in span.draws
            ]
        )
        scores = tuple([self._score(span) for span in plan.spans if span.score_targets])
        kept = self._keep(plan.spans)
        slices = tuple([self._slice(each.micro_batch, each.hi, each.lo) for each in plan.slices])
        updates = tuple([self._update(each.trainer) for each in plan.updates])
        elapsed_s = forward_s + sum([each.elapsed_s for each in slices])
        elapsed_s += sum([each.elapsed_s for each in updates])
        self._clock.advance(elapsed_s)
        self._ended_s = self._clock.now()
        result = StepResult(
            plan.step, plan.lane, elapsed_s, draws, scores, (), forward_s, slices, updates, kept
        )
        if self._on_plan is not None:
            self._on_plan(plan, result)
        self._results.append(result)
        return plan.step

    def poll(self) -> list[StepResult]:
        """Results of all plans since the last call."""
        results, self._results = self._results, []
        return results

    def seconds_of(self, work: PassWork) -> float:
        """What a pass takes, noise included; as `submit` would draw it. The first one after the
        clock has moved without work takes longer."""
        if not work.tokens:
            return 0.0
        seconds = self._latency.forward_s(work)
        if self._noise:
            seconds = self._noisy(seconds, kind_of(work))
        now = self._clock.now()
        if now == self._ended_s:
            return seconds
        self._ended_s = now
        return seconds + self._profile.resume_s

    def work_until(self, now_s: float) -> None:
        """Let the time of a leap pass."""
        self._clock.advance_to(now_s)
        self._ended_s = now_s

    def token_of(self, seq_id: int, position: int) -> int:
        """The token that a sequence draws at an output position."""
        return (seq_id * _STRIDE + position) % self.info.vocab_size

    def load_adapter(self, version: AdapterVersion) -> None:
        """Nothing to load."""

    def drop_adapter(self, content_hash: str) -> None:
        """Nothing to drop."""

    def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        """A trainer without parameters."""
        self._trainers[spec.name] = _Trainer()
        return TrainerState(spec.name, 0, 0)

    def close_trainer(self, name: str) -> None:
        """Forget it and what it recorded."""
        self._trainers.pop(name, None)
        for number in [number for number, each in self._open.items() if each.trainer == name]:
            self._forget(number)

    def snapshot_trainer(self, name: str) -> TrainerSnapshot:
        """There are no parameters to copy. Raises `AdapterError`."""
        raise AdapterError("a simulated trainer has no parameters to save")

    def adopt(self, snapshot: TrainerSnapshot, content_hash: str) -> None:
        """Nothing to adopt."""

    def memory_bytes(self) -> Mapping[str, int]:
        """Rows that are recorded; nothing else takes memory."""
        return {"recorded_rows": sum(sum(each.lengths) for each in self._open.values())}

    def _noisy(self, seconds: float, kind: str) -> float:
        residuals = self._noise.get(kind) or self._noise.get("pass")
        return seconds * max(0.1, 1.0 + self._rng.choice(residuals)) if residuals else seconds

    def _score(self, span: Span) -> ScoreResult:
        """Chosen and rejected sequences take turns; their difference is the curve's margin."""
        total = -1.0 * sum([target >= 0 for target in span.score_targets])
        if span.record is not None:
            opened, place = self._open[span.record.micro_batch], span.record.sequence
            margin = self._curve.margin(self._trainers[opened.trainer].revision)
            half = margin / self._beta / 2.0
            total = half if place % 2 == 0 else -half
            if span.end < opened.lengths[place]:  # the last piece carries the sum
                total = 0.0
        return ScoreResult(span.seq_id, span.start, (), total)

    def _keep(self, spans: tuple[Span, ...]) -> tuple[KeptLayers, ...]:
        """What the profiled device keeps: one share of what a pass of nothing but whole
        micro-batches records, another of what is recorded otherwise."""
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

    def _slice(self, number: int, hi: int, lo: int) -> SliceResult:
        seconds = self._noisy(self._latency.slice_s(self._backward[number], hi - lo), "slice")
        self._backward[number] = self._backward[number].after_slice()
        if lo == 0:
            self._forget(number)
        return SliceResult(number, hi, lo, seconds)

    def _update(self, name: str) -> UpdateResult:
        trainer = self._trainers[name]
        trainer.revision += 1
        return UpdateResult(name, trainer.revision, True, 1.0, 1e-4, self._latency.update_s())

    def _forget(self, number: int) -> None:
        self._open.pop(number, None)
        self._backward.pop(number, None)
