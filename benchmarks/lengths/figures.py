"""How good quantiles are: pinball loss, error of the median, rank correlation, calibration.

Knows arrays only. Invariant: all are of the same rows, in tokens or as shares of 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.lengths.ladder import asked_of
from benchmarks.lengths.rows import Row
from tandem.core.lengths import LEVELS, Forecast
from tandem.estimators.learned_length import by_text, learned
from tandem.estimators.length_choice import LengthChoice
from tandem.estimators.output_length import by_batch, by_traffic, pinball, pinballs

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one predictor: means in tokens, Spearman's correlation of the median with the length,
    shares of the answers inside the bounds for 50% and 90%."""

    pinball: float
    absolute: float
    spearman: float
    inside_50: float
    inside_90: float


def figures(quantiles: Array, lengths: Array) -> Figures:
    """Of quantiles [n, levels] and the lengths [n]."""
    low, lower, median, upper, high = quantiles.T
    return Figures(
        pinball=float(pinballs(quantiles, lengths).mean()),
        absolute=float(np.abs(median - lengths).mean()),
        spearman=spearman(median, lengths),
        inside_50=float(((lower <= lengths) & (lengths <= upper)).mean()),
        inside_90=float(((low <= lengths) & (lengths <= high)).mean()),
    )


def spearman(left: Array, right: Array) -> float:
    """Rank correlation; ties have their mean rank; 0 if one side does not vary."""
    first, second = _ranks(left), _ranks(right)
    spread = float(first.std() * second.std())
    if spread == 0.0:
        return 0.0
    return float(((first - first.mean()) * (second - second.mean())).mean() / spread)


def _ranks(values: Array) -> Array:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(count) - (count - 1) / 2.0)[place]
    return ranks


def given(
    quantiles: Array, rows: Sequence[Row], produced: int
) -> tuple[Figures, Figures, int] | None:
    """Of the answers that are longer than `produced`: what the quantiles say without that
    knowledge and with it; None if there are no such answers."""
    longer = [place for place, row in enumerate(rows) if row.output_tokens > produced]
    if not longer:
        return None
    lengths = np.array([rows[place].output_tokens for place in longer], dtype=float)
    known = [
        Forecast(tuple(quantiles[place].tolist()), rows[place].max_tokens, "") for place in longer
    ]
    with_it = np.array([[each.quantile(level, produced) for level in LEVELS] for each in known])
    return figures(quantiles[longer], lengths), figures(with_it, lengths), len(longer)


@dataclass(frozen=True, slots=True)
class Believed:
    """What the server would have done with the same answers one after another: mean pinball loss
    of the predictor that was believed and of each alone, and how often each was believed."""

    answers: int
    pinball: float
    alone: dict[str, float]
    share: dict[str, float]


def in_order(rows: Sequence[Row]) -> Believed:
    """Answers arrive one by one; the source is taken for the batch. Only answers that all
    predictors predicted are counted."""
    lexical = by_text()
    choice = LengthChoice((by_batch(), by_traffic(), lexical))
    losses, alone, sources = list[float](), dict[str, list[float]](), list[str]()
    for row in rows:
        told = choice.predict(asked_of(row))
        if told.forecast is not None and len(told.quantiles) == 3:
            losses.append(pinball(told.forecast.tokens, row.output_tokens))
            sources.append(told.forecast.source)
            for name, quantiles in told.quantiles.items():
                alone.setdefault(name, []).append(pinball(quantiles, row.output_tokens))
        choice.observe(told, row.output_tokens)
        for adapter in lexical.due:
            lexical.take(adapter, learned(lexical.rows(adapter), lexical.shape))
    return Believed(
        len(losses),
        float(np.mean(losses)) if losses else 0.0,
        {name: float(np.mean(each)) for name, each in alone.items()},
        {name: sources.count(name) / len(sources) for name in alone},
    )
