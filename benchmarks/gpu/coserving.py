"""Training and requests on one device: each alone, then both, under the policy `unified`.

Requests arrive at random (Poisson), whatever the engine does; latencies count from these times.
SFT steps are queued without end. FlexLLM's figure is the measure: an 8B model at 5 requests/s.
Invariant: a window's training counts until its last step has ended, its requests until they end.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from random import Random

import numpy as np

from benchmarks.coexecution.engine_tandem import AHEAD, LORA, OPTIMIZER, TRAINER
from benchmarks.coexecution.workload import Training
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.engine import Engine
from benchmarks.gpu.options import Options
from tandem.core.plan import LanePlan, StepResult
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    StepOutcome,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.engine.loop import EngineLoop

Row = dict[str, object]
# Eight samples a step, as the server's default. Four a micro-batch: a slice has a fixed cost, and
# with one each, training alone ran at half the rate on an H100.
MICRO_BATCHES, SEQUENCES = 2, 4
DRAIN_S = 10.0
WARM_UP_SHARE = 0.5  # of a window's seconds
PAUSE_S = 0.001
_NUMBERS = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")


@dataclass(slots=True)
class Answer:
    """One request: when it was due, and when its tokens came."""

    due_s: float
    token_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """What the iterations of a window had."""

    iterations: int = 0
    recorded_rows: int = 0
    layers: int = 0  # of backward slices
    work_s: float = 0.0  # of the device
    forward_s: float = 0.0
    backward_s: float = 0.0

    def note(self, plan: LanePlan, result: StepResult) -> None:
        """An iteration has ended."""
        self.iterations += 1
        self.recorded_rows += sum(len(each.tokens) for each in plan.spans if each.record)
        self.layers += sum(each.hi - each.lo for each in result.slices)
        self.work_s += result.elapsed_s + sum(each.elapsed_s for each in result.timed)
        self.forward_s += result.forward_s
        self.backward_s += result.backward_s

    def row(self, seconds: float) -> Row:
        """Means an iteration, over a window of so many seconds. What the device did not compute in
        is the loop's time, with captures of new passes."""
        each = 1.0 / max(1, self.iterations)
        return {
            "iterations": self.iterations,
            "recorded_rows": each * self.recorded_rows,
            "layers": each * self.layers,
            "forward_ms": 1e3 * each * self.forward_s,
            "backward_ms": 1e3 * each * self.backward_s,
            "beside_ms": 1e3 * each * (seconds - self.work_s),
        }


@dataclass(frozen=True, slots=True)
class Found:
    """What one window gave."""

    training_tokens_per_s: float
    answers: list[Answer]
    answer_tokens: int
    iterations: Row = field(default_factory=dict)

    def latencies(self) -> Row:
        """Percentiles over complete requests in ms; nothing where there were none."""
        whole = [each for each in self.answers if len(each.token_s) == self.answer_tokens]
        row: Row = {"requests": len(self.answers), "unfinished": len(self.answers) - len(whole)}
        if not whole:
            return row
        first = [1e3 * (each.token_s[0] - each.due_s) for each in whole]
        later = [
            1e3 * (each.token_s[-1] - each.token_s[0]) / max(1, self.answer_tokens - 1)
            for each in whole
        ]
        found = (*np.percentile(first, (50, 99)), *np.percentile(later, (50, 99)))
        return {**row, **dict(zip(_NUMBERS, map(float, found), strict=True))}


class Window:
    """One window over a loop with an open trainer."""

    def __init__(self, loop: EngineLoop, options: Options, seed: int) -> None:
        self._loop, self._options = loop, options
        self._prefix, self._numbers = f"window-{seed}", count()
        self._rng = Random(seed)
        self._vocabulary = loop.info.vocab_size
        tokens = options.sequence_tokens
        sequences = MICRO_BATCHES * SEQUENCES
        self._training = Training(
            "sft", self._vocabulary, seed, 0.0, (), sequences=sequences, tokens=tokens
        )
        self._batches = self._training.batches()
        self._queued = 0
        self._ends_s: list[float] = []
        self._answers: dict[str, Answer] = {}
        self._open: dict[str, int] = {}
        self._tally = Tally()

    def run(self, seconds: float, *, slo: Slo | None, trains: bool) -> Found:
        """Requests with the objectives `slo` (none: no requests), and training if it `trains`."""
        self._loop.on_plan = self._tally.note
        try:
            return self._run(seconds, slo, trains=trains)
        finally:
            self._loop.on_plan = None
            self._clear()

    def _run(self, seconds: float, slo: Slo | None, *, trains: bool) -> Found:
        loop, began_s = self._loop, time.monotonic()
        due = deque(self._arrivals(began_s, seconds) if slo is not None else ())
        urgent = lambda: bool(due) and due[0] <= time.monotonic()  # noqa: E731
        while (now_s := time.monotonic()) < began_s + seconds + DRAIN_S:
            over = now_s >= began_s + seconds
            if over and not (due or self._open):
                break
            while slo is not None and due and due[0] <= now_s:
                self._ask(due.popleft(), slo)
            while trains and self._queued < AHEAD:
                self._teach()
            if not loop.has_work:
                time.sleep(min(loop.pause_s, PAUSE_S))
                continue
            for event in loop.step(urgent):
                self._note(event.request_id, len(event.tokens), event.error)
            self._take_steps()
        return self._found(began_s, seconds)

    def _arrivals(self, began_s: float, seconds: float) -> Iterator[float]:
        at_s = began_s + self._rng.expovariate(self._options.rate)
        while at_s < began_s + seconds:
            yield at_s
            at_s += self._rng.expovariate(self._options.rate)

    def _ask(self, due_s: float, slo: Slo) -> None:
        name = f"{self._prefix}-{next(self._numbers)}"
        prompt = tuple(self._rng.choices(range(self._vocabulary), k=self._options.prompt_tokens))
        tokens = self._options.answer_tokens
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self._answers[name], self._open[name] = Answer(due_s), tokens
        self._loop.add(Request(name, prompt, sampling, slo=slo, arrival_s=due_s))

    def _note(self, name: str, tokens: int, error: str | None) -> None:
        if error is not None:
            raise RuntimeError(error)
        self._answers[name].token_s += [time.monotonic()] * tokens
        self._open[name] -= tokens
        if self._open[name] <= 0:
            del self._open[name]

    def _teach(self) -> None:
        sequences = [
            TrainingSequence(tuple(tokens), self._training.prompt_tokens, Role.TARGET)
            for tokens in next(self._batches)
        ]
        places = iter(sequences)
        parts = tuple(tuple(islice(places, SEQUENCES)) for _ in range(MICRO_BATCHES))
        name = f"{self._prefix}-step-{next(self._numbers)}"
        self._loop.teaching.add_step(TrainingStep(name, TRAINER, LossSpec(LossKind.SFT), parts))
        self._queued += 1

    def _take_steps(self) -> None:
        for each in self._loop.teaching.take_learned():
            if not isinstance(each, StepOutcome) or not each.applied:
                raise RuntimeError(f"a training step failed: {each}")
            self._queued -= 1
            self._ends_s.append(time.monotonic())

    def _found(self, began_s: float, seconds: float) -> Found:
        ended = [at_s for at_s in self._ends_s if at_s <= began_s + seconds]
        tokens = len(ended) * self._training.step_tokens
        rate = tokens / (ended[-1] - began_s) if ended else 0.0
        spent = self._tally.row(time.monotonic() - began_s)
        return Found(rate, list(self._answers.values()), self._options.answer_tokens, spent)

    def _clear(self) -> None:
        """Leave nothing behind: the next window's requests and steps are alone."""
        for name in self._open:
            self._loop.abort(name)
        self._loop.teaching.cancel_steps(TRAINER)
        ends_s = time.monotonic() + DRAIN_S
        while math.isfinite(self._loop.pause_s) and time.monotonic() < ends_s:
            time.sleep(self._loop.pause_s)
            self._loop.step()
        self._loop.teaching.take_learned()


def coserving(engine: Engine, _: Ceilings, options: Options) -> Iterator[Row]:
    """Training alone, requests alone, and both with each objective."""
    loop, seeds = engine.tandem.loop, count(options.seed)
    loop.teaching.open_trainer(TrainerSpec(TRAINER, LORA, OPTIMIZER))
    usual = Slo(options.ttft_slo, 1.0)

    def window(seconds: float, slo: Slo | None, *, trains: bool) -> Found:
        return Window(loop, options, next(seeds)).run(seconds, slo=slo, trains=trains)

    try:
        window(WARM_UP_SHARE * options.seconds, None, trains=True)
        found_alone = window(options.seconds, None, trains=True)
        training = found_alone.training_tokens_per_s
        row: Row = {"model": engine.name, "requests_per_s": options.rate}
        kept: Row = {"training_tokens_per_s": training, "kept": 1.0, **found_alone.iterations}
        yield {**row, "window": "training alone", **kept}
        served = window(options.seconds, usual, trains=False)
        alone = served.latencies()
        yield {**row, "window": "requests alone", **alone, **served.iterations}
        tpot = alone.get("tpot_p50_ms")
        if not isinstance(tpot, float):
            raise RuntimeError("no request ended while they were alone")
        for place, factor in enumerate(options.tpot_factors):
            slo = Slo(options.ttft_slo, factor * tpot / 1e3)
            if place == 0:  # times of such passes are known after it
                window(WARM_UP_SHARE * options.seconds, slo, trains=True)
            both = window(options.seconds, slo, trains=True)
            found = both.latencies()
            yield {
                **row,
                "window": "both",
                "tpot_objective_ms": 1e3 * slo.tpot_s,
                "training_tokens_per_s": both.training_tokens_per_s,
                "kept": both.training_tokens_per_s / training if training else 0.0,
                **found,
                **both.iterations,
                "tpot_ratio": _ratio(found.get("tpot_p50_ms"), tpot),
            }
    finally:
        loop.teaching.close_trainer(TRAINER)


def _ratio(found: object, alone: float) -> float | None:
    return found / alone if isinstance(found, float) else None
