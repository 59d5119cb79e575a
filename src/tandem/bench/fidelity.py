"""`tandem bench fidelity`: the same load on the real engine and in the simulator, side by side.

Runs loops that the caller makes, compares their figures, and shows where they differ: predictions
by kind of work, and the time of an iteration outside of the executor. Loads no model. Invariant:
both sides get the same arrivals and prompts, and are measured by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, median

from tandem.bench.measure import percentile
from tandem.core.clock import WaitingClock
from tandem.core.plan import LanePlan, StepResult
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.engine.loop import EngineLoop
from tandem.estimators.calibrate import kind_of
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.work import BackwardWork, PassWork
from tandem.sim.run import Arrival, SimReport, Simulation

SCHEMA = "tandem-fidelity-1"
TRAINER = "fidelity"
# How far the simulator may be off, unless real runs differ by more among themselves.
THROUGHPUT_TOLERANCE = 0.05
LATENCY_TOLERANCE = 0.10


@dataclass(frozen=True, slots=True)
class Steps:
    """SFT steps that are always queued: one micro-batch of `sequences` sequences of `tokens`
    tokens, of which half are the answer."""

    sequences: int = 2
    tokens: int = 256
    rank: int = 16

    @property
    def trainer(self) -> TrainerSpec:
        """The trainer to open for them."""
        return TrainerSpec(TRAINER, LoraSpec(rank=self.rank))

    def supply(self, vocabulary: int, seed: int) -> Callable[[], TrainingStep]:
        """Endless steps of random tokens. Equal seeds give equal steps."""
        rng, made = Random(f"{seed}/steps"), 0

        def step() -> TrainingStep:
            nonlocal made
            made += 1
            batch = tuple(
                TrainingSequence(
                    tuple(rng.choices(range(vocabulary), k=self.tokens)),
                    self.tokens // 2,
                    Role.TARGET,
                )
                for _ in range(self.sequences)
            )
            return TrainingStep(f"step-{made}", TRAINER, LossSpec(LossKind.SFT), (batch,))

        return step


@dataclass(slots=True)
class Part:
    """One kind of work: number of executions, their total time, and the total prediction."""

    count: int = 0
    seconds: float = 0.0
    predicted_s: float = 0.0

    def add(self, seconds: float, predicted_s: float) -> None:
        """Count one execution."""
        self.count += 1
        self.seconds += seconds
        self.predicted_s += predicted_s


class Account:
    """A listener of a loop's plans: their time by kind, and a time model's predictions for them.

    With `learns`, the model learns from each plan after predicting it.
    """

    def __init__(self, latency: LatencyModel, *, learns: bool = False) -> None:
        self._latency, self._learns = latency, learns
        self._backward: dict[int, BackwardWork] = {}
        self._untimed: dict[tuple[int, int], float] = {}  # predictions, by recording and layer
        self.parts: dict[str, Part] = {}
        self.trained_rows = 0
        self.executed_s = 0.0

    def __call__(self, plan: LanePlan, result: StepResult) -> None:  # noqa: C901
        """Add one plan."""
        latency, work = self._latency, PassWork() if result.stopped else PassWork.of(plan)
        for number in [number for discard in plan.discards for number in discard.micro_batches]:
            self._backward.pop(number, None)
        for opened in plan.opens:
            self._backward[opened.micro_batch] = BackwardWork.of(opened.lengths)
        for kept in result.kept:
            if (opened_before := self._backward.get(kept.micro_batch)) is not None:
                self._backward[kept.micro_batch] = opened_before.with_kept(kept)
        before = dict(self._backward)
        self.executed_s += result.elapsed_s + sum(each.elapsed_s for each in result.timed)
        self.trained_rows += work.recorded
        if work.tokens:
            self.count(kind_of(work), result.forward_s, latency.forward_s(work))
        for piece in result.timed:
            if (predicted_s := self._untimed.pop((piece.micro_batch, piece.hi), None)) is not None:
                self.count("slice", piece.elapsed_s, predicted_s)
        for piece in result.slices:
            backward = self._backward.pop(piece.micro_batch, None)
            if backward is None or piece.problem is not None:  # None: its iteration failed
                continue
            predicted_s = latency.slice_s(backward, piece.hi - piece.lo)
            if math.isnan(piece.elapsed_s):
                self._untimed[piece.micro_batch, piece.hi] = predicted_s
            else:
                self.count("slice", piece.elapsed_s, predicted_s)
            if piece.lo > 0:
                self._backward[piece.micro_batch] = backward.after_slice()
        for update in result.updates:
            self.count("update", update.elapsed_s, latency.update_s())
        if self._learns:
            latency.observe(plan, result, before.get)
        elif plan.spans:
            latency.after(result.forward_s)

    def count(self, kind: str, seconds: float, predicted_s: float) -> None:
        """Add work of one kind that took `seconds`."""
        self.parts.setdefault(kind, Part()).add(seconds, predicted_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run. Rates are per second until the last request ended."""

    output_tokens_s: float
    training_tokens_s: float
    ttft_mean_s: float
    ttft_p95_s: float
    tpot_mean_s: float
    tpot_p95_s: float
    failed: int
    iterations: int
    # Mean seconds of an iteration outside of the executor: decide, apply, start and collect.
    outside_s: float
    parts: dict[str, Part] = field(default_factory=dict)  # by kind of work


def run_once(
    loop: EngineLoop,
    clock: WaitingClock,
    arrivals: Sequence[Arrival],
    rates: Rates,
    steps: Steps | None,
    seed: int,
    on_progress: Callable[[float], None] = lambda now: None,
) -> Figures:
    """Run the arrivals on one loop, with training beside them if there are `steps`."""
    account = Account(LatencyModel(rates))
    loop.on_plan = account
    supply = steps.supply(loop.info.vocab_size, seed) if steps is not None else None
    trainers = [steps.trainer] if steps is not None else []
    try:
        report = Simulation(loop, clock, arrivals, trainers, supply=supply).run(
            on_progress=on_progress
        )
    finally:
        loop.on_plan = None
        if steps is not None:
            loop.teaching.close_trainer(TRAINER)
    stats = loop.stats()
    outside_s = stats.schedule_s + stats.execute_s - account.executed_s
    return figures_of(report, account, outside_s)


def figures_of(report: SimReport, account: Account, outside_s: float) -> Figures:
    """Figures from a run's report and account. `outside_s` is the total of all iterations."""
    ended = [each for each in report.outcomes.values() if each.error is None]
    last_s = max((each.last_s for each in ended), default=math.nan)
    waits = sorted(each.ttft_s for each in ended)
    tokens = sorted(value for each in ended if (value := each.tpot_s) is not None)
    return Figures(
        output_tokens_s=sum(each.output_tokens for each in ended) / last_s,
        training_tokens_s=account.trained_rows / last_s,
        ttft_mean_s=_mean(waits),
        ttft_p95_s=percentile(waits, 0.95) if waits else math.nan,
        tpot_mean_s=_mean(tokens),
        tpot_p95_s=percentile(tokens, 0.95) if tokens else math.nan,
        failed=len(report.outcomes) - len(ended),
        iterations=report.iterations,
        outside_s=outside_s / max(1, report.iterations),
        parts=account.parts,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure: medians of both sides, the spread of real runs, and the allowed error.

    `spread`, `error` and `allowed` are relative to the real median.
    """

    figure: str
    real: float
    simulated: float
    spread: float
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the simulator is close enough."""
        return abs(self.error) <= self.allowed


_COMPARED = {
    "output_tokens_s": THROUGHPUT_TOLERANCE,
    "training_tokens_s": THROUGHPUT_TOLERANCE,
    "ttft_mean_s": LATENCY_TOLERANCE,
    "ttft_p95_s": LATENCY_TOLERANCE,
    "tpot_mean_s": LATENCY_TOLERANCE,
    "tpot_p95_s": LATENCY_TOLERANCE,
}


def compare(real: Sequence[Figures], simulated: Sequence[Figures]) -> list[Comparison]:
    """Compare every figure that is above 0 in the median real run. Allowed is the figure's
    tolerance or the spread of the real runs, whichever is larger."""
    found = []
    for name, tolerance in _COMPARED.items():
        theirs = [float(getattr(each, name)) for each in real]
        middle = median(theirs)
        if not middle > 0.0:
            continue
        value = median([float(getattr(each, name)) for each in simulated])
        spread = (max(theirs) - min(theirs)) / middle
        error = value / middle - 1.0
        found.append(Comparison(name, middle, value, spread, error, max(tolerance, spread)))
    return found


def agree(
    found: Sequence[Comparison], real: Sequence[Figures], simulated: Sequence[Figures]
) -> bool:
    """Whether every figure holds, and all runs of both sides failed the same number of requests."""
    failed = {each.failed for each in (*real, *simulated)}
    return len(failed) == 1 and all(each.holds for each in found)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
