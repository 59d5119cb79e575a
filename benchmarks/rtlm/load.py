"""Tasks with real lengths and forecasts, and when they arrive (RT-LM, V-A).

A task is an answer that a model gave, with what was predicted of it by cross-validation. Knows no
policy. Invariant: a seed determines the load; all policies get the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.lengths.ladder import predicted, steps
from benchmarks.lengths.rows import Row
from tandem.core.lengths import LEVELS, Forecast
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import PassWork
from tandem.sim.run import Arrival

SUBSETS = ("small", "normal", "large")
"""Variance of the predicted lengths."""
BETAS = tuple(range(10, 160, 10))
"""Arrivals a minute."""
MALICIOUS = 0.9  # the paper's k: predictions above this quantile
_MEDIAN = LEVELS.index(0.5)
# Full use of a device: one more doubling of the batch brings less than this.
_WORTH = 1.1


@dataclass(frozen=True, slots=True)
class Task:
    """One answer: its tokens, and quantiles of what was predicted of it."""

    input_tokens: int
    output_tokens: int
    most: int
    quantiles: tuple[float, ...]

    @property
    def expected(self) -> float:
        """The paper's u."""
        return self.quantiles[_MEDIAN]


def tasks_of(rows: Sequence[Row], scale: float, step: str) -> list[Task]:
    """All answers, `scale` times as long; forecasts by a step of the ladder of predictors."""
    found = scale * predicted(steps({})[step], rows)
    return [
        Task(
            max(1, round(scale * row.input_tokens)),
            max(1, round(scale * row.output_tokens)),
            max(1, round(scale * row.max_tokens)),
            tuple(np.maximum.accumulate(np.maximum(1.0, quantiles)).tolist()),
        )
        for row, quantiles in zip(rows, found, strict=True)
    ]


def subset(tasks: Sequence[Task], name: str) -> list[Task]:
    """A half of the tasks: `small` has the middle of the predictions, `large` both ends; `normal`
    is all of them."""
    ordered = sorted(tasks, key=lambda task: task.expected)
    quarter = len(ordered) // 4
    match name:
        case "small":
            return ordered[quarter:-quarter]
        case "large":
            return ordered[:quarter] + ordered[-quarter:]
        case _:
            return ordered


def with_malicious(
    tasks: Sequence[Task], share: float, count: int, rng: Random
) -> list[tuple[Task, bool]]:
    """`count` tasks, each malicious with the probability `share`: drawn from those that are
    predicted to be longest. With the flag."""
    ordered = sorted(tasks, key=lambda task: task.expected)
    edge = min(int(MALICIOUS * len(ordered)), len(ordered) - 1)
    benign, crafted = ordered[:edge], ordered[edge:]
    bad = [rng.random() < share for _ in range(count)]
    return [(rng.choice(crafted if each else benign), each) for each in bad]


def times(unit_s: float, rng: Random) -> list[float]:
    """Poisson arrivals: at each rate of `BETAS` for one of its minutes of 60 `unit_s`, shuffled."""
    found: list[float] = []
    for place, beta in enumerate(rng.sample(BETAS, len(BETAS))):
        at_s = rng.expovariate(beta / 60.0)
        while at_s < 60.0:
            found.append(unit_s * (60.0 * place + at_s))
            at_s += rng.expovariate(beta / 60.0)
    return found


def arrivals(tasks: Sequence[Task], at_s: Sequence[float], rng: Random) -> list[Arrival]:
    """Requests `task-N` with forecasts; tasks are drawn in a shuffled order, again if they are too
    few. Prompts share nothing."""
    order: list[Task] = []
    while len(order) < len(at_s):
        order += rng.sample(list(tasks), len(tasks))
    pairs = zip(order, at_s, strict=False)
    return [request(task, number, when) for number, (task, when) in enumerate(pairs)]


def request(task: Task, number: int, at_s: float) -> Arrival:
    """One task's arrival."""
    prompt = tuple((7919 * (number + 1) + 31 * place) % 1000 for place in range(task.input_tokens))
    sampling = SamplingParams(max_tokens=task.output_tokens, temperature=0.0, ignore_eos=True)
    length = Forecast(task.quantiles, task.most, "study")
    return Arrival(at_s, Request(f"task-{number}", prompt, sampling, length=length))


def batch_of(latency: LatencyModel, context: int) -> int:
    """The paper's C: the smallest batch (a power of two) at full use of the device."""
    size = 1
    while size < 64 and _rate(latency, 2 * size, context) > _WORTH * _rate(latency, size, context):
        size *= 2
    return size


def coefficients(
    latency: LatencyModel, tasks: Sequence[Task], batch: int, context: int
) -> tuple[float, float]:
    """The paper's phi and eta, fitted: seconds of a response for each input token, and of an output
    token, in a full batch."""
    eta = batch / _rate(latency, batch, context)
    seconds = []
    for task in tasks:
        prefill = PassWork()
        prefill.span(0, task.input_tokens, draws=1)
        seconds.append(latency.forward_s(prefill) + eta * task.output_tokens)
    inputs = np.array([task.input_tokens for task in tasks], float)
    return float(inputs @ np.array(seconds) / (inputs @ inputs)), eta


def _rate(latency: LatencyModel, batch: int, context: int) -> float:
    work = PassWork()
    work.decode_all([context] * batch)
    return batch / latency.forward_s(work)
