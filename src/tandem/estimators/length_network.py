"""A small network that maps features of a request to quantiles of its output length.

Numpy only: two hidden layers, the pinball loss on log lengths, Adam. The quantiles of a logarithm
are the logarithms of the quantiles, so the loss is right for tokens, too. Knows features, not what
they mean. Invariant: the same rows and seed give the same network, and its quantiles do not cross.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tandem.core.lengths import LEVELS

Array = NDArray[np.float32]
_RATE, _BETA_1, _BETA_2, _EPSILON = 3e-3, 0.9, 0.99, 1e-8
_DECAY = 1e-4
_BATCH = 128
_NARROW = 0.1  # a feature that hardly varies is not spread out
_FAR = 4.0
_SMOOTH = 0.05  # width around zero in which the loss is taken for a parabola


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the hidden layers, and how often each row is read."""

    hidden: tuple[int, ...] = (32, 32)
    epochs: int = 40


class LengthNetwork:
    """Made by `fit`; `predict` may be called from any thread."""

    def __init__(self, weights: Sequence[Array], mean: Array, scale: Array) -> None:
        self._weights = weights
        self._mean, self._scale = mean, scale

    def predict(self, features: NDArray[np.floating]) -> NDArray[np.float64]:
        """Quantiles in tokens [n, levels] of rows [n, features]."""
        rows = _standard(features, self._mean, self._scale)
        logs = _forward(self._weights, rows)[-1]
        tokens: NDArray[np.float64] = np.exp(np.sort(logs, axis=1).astype(np.float64))
        return np.maximum(tokens, 1.0)


def fit(
    features: NDArray[np.floating],
    lengths: NDArray[np.floating],
    *,
    shape: Shape | None = None,
    seed: int = 0,
) -> LengthNetwork:
    """A network for rows [n, features] and their lengths [n], each at least 1."""
    shape = shape or Shape()
    rng = np.random.default_rng(seed)
    mean = features.mean(axis=0).astype(np.float32)
    scale = np.maximum(features.std(axis=0), _NARROW).astype(np.float32)
    rows = _standard(features, mean, scale)
    targets = np.log(lengths).astype(np.float32)
    weights = list(_initial((rows.shape[1], *shape.hidden, len(LEVELS)), rng))
    weights[-1][:] = np.quantile(targets, LEVELS)
    first = [np.zeros_like(each) for each in weights]
    second = [np.zeros_like(each) for each in weights]
    steps = shape.epochs * -(-len(rows) // _BATCH)
    done = 0
    for _ in range(shape.epochs):
        order = rng.permutation(len(rows))
        for start in range(0, len(rows), _BATCH):
            some = order[start : start + _BATCH]
            gradients = _gradients(weights, rows[some], targets[some])
            done += 1
            rate = _RATE * (1.0 - (done - 1) / steps) * np.sqrt(1 - _BETA_2**done)
            for weight, gradient, m, v in zip(weights, gradients, first, second, strict=True):
                m += (1 - _BETA_1) * (gradient - m)
                v += (1 - _BETA_2) * (gradient * gradient - v)
                weight -= rate / (1 - _BETA_1**done) * m / (np.sqrt(v) + _EPSILON)
    return LengthNetwork(weights, mean, scale)


def _standard(features: NDArray[np.floating], mean: Array, scale: Array) -> Array:
    """Rows with mean 0 and deviation 1; nothing is taken for further out than it can be learned."""
    rows: Array = np.clip((features.astype(np.float32) - mean) / scale, -_FAR, _FAR)
    return rows


def _initial(sizes: Sequence[int], rng: np.random.Generator) -> Iterator[Array]:
    """Weights and biases, layer after layer; the last layer begins with constants alone."""
    last = len(sizes) - 2
    for place, (inputs, outputs) in enumerate(pairwise(sizes)):
        spread = 0.0 if place == last else np.sqrt(2.0 / inputs)
        yield (spread * rng.standard_normal((inputs, outputs))).astype(np.float32)
        yield np.zeros(outputs, np.float32)


def _forward(weights: Sequence[Array], rows: Array) -> list[Array]:
    """The rows, and what each layer makes of them."""
    made = [rows]
    for place in range(0, len(weights), 2):
        out = made[-1] @ weights[place] + weights[place + 1]
        made.append(out if place + 2 == len(weights) else np.maximum(out, 0.0))
    return made


def _gradients(weights: Sequence[Array], rows: Array, targets: Array) -> list[Array]:
    made = _forward(weights, rows)
    short = targets[:, None] - made[-1]
    below = np.clip(0.5 - short / (2 * _SMOOTH), 0.0, 1.0)  # 1 where the quantile is too high
    slope = (below - np.array(LEVELS, np.float32)).astype(np.float32) / len(rows)
    found = list[Array]()
    for place in range(len(weights) - 2, -1, -2):
        found += [slope.sum(axis=0), made[place // 2].T @ slope + _DECAY * weights[place]]
        if place:
            slope = (slope @ weights[place].T) * (made[place // 2] > 0.0)
    return found[::-1]
