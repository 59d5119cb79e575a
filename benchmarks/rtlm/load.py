"""Tasks with real lengths and forecasts: the answers of the study, and parts of them (RT-LM, V-A).

A task is an answer that a model gave, with what was predicted of it by cross-validation. Knows no
policy. Invariant: a seed determines what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from benchmarks.lengths.ladder import predicted, steps
from benchmarks.lengths.rows import Row
from tandem.bench.answers import Answer, answer_of
from tandem.engine.placement import quantile_of

SUBSETS = ("small", "normal", "large")
"""Variance of the predicted lengths."""
MALICIOUS = 0.9  # the paper's k: predictions above this quantile


def tasks_of(rows: Sequence[Row], step: str) -> list[Answer]:
    """All answers; forecasts by a step of the ladder of predictors."""
    return [
        answer_of(row.input_tokens, row.output_tokens, row.max_tokens, quantiles)
        for row, quantiles in zip(rows, predicted(steps({})[step], rows), strict=True)
    ]


def subset(tasks: Sequence[Answer], name: str) -> list[Answer]:
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


def apart(tasks: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Benign tasks, and those that stand for crafted ones: the tenth that is predicted to be
    longest."""
    ordered = sorted(tasks, key=lambda task: task.expected)
    edge = min(int(MALICIOUS * len(ordered)), len(ordered) - 1)
    return ordered[:edge], ordered[edge:]


def tau_of(tasks: Sequence[Answer]) -> float:
    """Equation 4, with these tasks for the training set."""
    return quantile_of(sorted(task.expected for task in tasks), MALICIOUS)


def foreseen(tasks: Sequence[Answer]) -> list[Answer]:
    """The same tasks with perfect forecasts."""
    return [
        replace(task, quantiles=(float(task.output_tokens),) * len(task.quantiles))
        for task in tasks
    ]


def with_malicious(
    tasks: Sequence[Answer], share: float, count: int, rng: Random
) -> list[tuple[Answer, bool]]:
    """`count` tasks, each malicious with the probability `share`, with the flag. With the same seed
    a greater share only replaces benign tasks."""
    benign, crafted = apart(tasks)
    drawn = [(rng.random(), rng.choice(benign), rng.choice(crafted)) for _ in range(count)]
    return [(bad if at < share else good, at < share) for at, good, bad in drawn]
