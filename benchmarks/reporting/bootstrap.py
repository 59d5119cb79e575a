"""Paired bootstrap: how sure a difference or ratio of two means is.

The same clusters (one pair of preferences, met by both policies under several seeds; one request)
are drawn with replacement for both sides, so that what made them easy or hard cancels out.
Invariant: the same numbers and seed give the same interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
_BLOCK = 200


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the 2.5th and 97.5th percentile of its bootstrap distribution."""

    value: float
    low: float
    high: float


Clusters = Mapping[str, Sequence[tuple[float, float]]]
"""(ours, theirs) of each observation, by cluster."""


def difference(clusters: Clusters, seed: int = 0) -> Interval:
    """Of the means, ours less theirs."""
    sums, counts = _sums(clusters)
    gap = sums[:, 0] - sums[:, 1]
    weights = _weights(len(counts), seed)
    drawn = (weights @ gap) / (weights @ counts)
    return _interval(float(gap.sum() / counts.sum()), drawn)


def nested_difference(clusters: Clusters, seed: int = 0) -> Interval:
    """As `difference`, where observations are drawn anew within each cluster that is drawn: an
    interval for few clusters, rather too wide than too narrow."""
    sums, counts = _sums(clusters)
    weights = _weights(len(counts), seed)
    rng = np.random.default_rng(seed + 1)
    drawn = np.zeros(DRAWS)
    for values, taken in zip(clusters.values(), weights.T, strict=True):
        gaps = np.array([ours - theirs for ours, theirs in values])
        size = len(gaps)
        drawn += rng.multinomial(size * taken.astype(int), np.full(size, 1.0 / size)) @ gaps
    value = float((sums[:, 0] - sums[:, 1]).sum() / counts.sum())
    return _interval(value, drawn / (weights @ counts))


def ratio(clusters: Clusters, seed: int = 0) -> Interval:
    """Of the means, ours over theirs; not finite where their mean is 0."""
    sums, counts = _sums(clusters)
    weights = _weights(len(counts), seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = (weights @ sums[:, 0]) / (weights @ sums[:, 1])
        value = float(sums[:, 0].sum() / sums[:, 1].sum())
    return _interval(value, drawn)


def _sums(clusters: Clusters) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums [clusters, 2] and numbers of observations [clusters]."""
    assert clusters, "there is nothing to draw from"
    sums = np.array([np.sum(values, axis=0) for values in clusters.values()], dtype=np.float64)
    return sums, np.array([len(values) for values in clusters.values()], dtype=np.float64)


def _weights(clusters: int, seed: int) -> NDArray[np.float64]:
    """How often each draw takes each cluster [DRAWS, clusters]."""
    rng = np.random.default_rng(seed)
    even = np.full(clusters, 1.0 / clusters)
    blocks = [rng.multinomial(clusters, even, _BLOCK) for _ in range(DRAWS // _BLOCK)]
    return np.concatenate(blocks).astype(np.float64)


def _interval(value: float, drawn: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(value, float(low), float(high))
