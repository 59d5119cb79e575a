"""RT-LM's ladder (figure 2), and the predictors of the server: quantiles by cross-validation.

A step of the ladder is fitted to some rows and gives quantiles of others. One that gives a point
gets its quantiles from its own errors on the rows that it was fitted to. Knows rows only.
Invariant: no step sees a row, or another answer to the same prompt, that it is judged by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.lengths.hidden import States
from benchmarks.lengths.rows import Row
from tandem.core.lengths import LEVELS, Asked
from tandem.estimators.learned_length import features_of
from tandem.estimators.length_network import Shape, fit
from tandem.services.lengths.scores import Uncertainty

Array = NDArray[np.float64]
Step = Callable[[Sequence[Row], Sequence[Row]], Array]
"""From the rows to learn from, and the others, to the others' quantiles [n, levels] in tokens."""

FOLDS = 5
_COMPONENTS = 24  # of the hidden states
_PAPER_LAYERS, _PAPER_EPOCHS, _PAPER_RATE = (100, 200, 200, 100), 100, 1e-4


def steps(hidden: States) -> dict[str, Step]:
    """The ladder, from the lowest step; those of hidden states only if there are any."""
    found: dict[str, Step] = {
        "history": _history,
        "input length": _linear(_input_length),
        "single rule": _linear(_single_rule),
        "weighted rules": _linear(_scores),
        "MLP on the six scores": _perceptron,
        "lexical": _network(_lexical),
    }
    if hidden:
        found["hidden"] = _of_states(hidden, _nothing)
        found["hidden and lexical"] = _of_states(hidden, _lexical)
    return found


def predicted(step: Step, rows: Sequence[Row], seed: int = 0) -> Array:
    """Quantiles of all rows [n, levels], each by a step that was fitted to the other folds."""
    found = np.zeros((len(rows), len(LEVELS)))
    for learned, judged in folds(rows, seed):
        there = [rows[place] for place in judged]
        found[judged] = step([rows[place] for place in learned], there)
    most = np.array([row.max_tokens for row in rows], dtype=float)
    return np.clip(found, 1.0, most[:, None])


def folds(rows: Sequence[Row], seed: int) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Places to learn from and places to judge by; a prompt's answers stay together."""
    keys = sorted({row.key for row in rows})
    drawn = np.random.default_rng(seed).permutation(len(keys)) % FOLDS
    fold_of = dict(zip(keys, drawn, strict=True))
    fold = np.array([fold_of[row.key] for row in rows])
    for number in range(FOLDS):
        yield np.flatnonzero(fold != number), np.flatnonzero(fold == number)


def asked_of(row: Row) -> Asked:
    """What the server knows of a row's answer before it begins."""
    chat = "chat/completions"
    return Asked("", chat, row.max_tokens, row.input_tokens, row.scores, row.source)


def lengths_of(rows: Sequence[Row]) -> Array:
    """Tokens of the answers."""
    return np.array([row.output_tokens for row in rows], dtype=float)


def _history(learned: Sequence[Row], judged: Sequence[Row]) -> Array:
    return np.tile(np.quantile(lengths_of(learned), LEVELS), (len(judged), 1))


def _linear(features: Callable[[Row], Sequence[float]]) -> Step:
    """Least squares."""

    def step(learned: Sequence[Row], judged: Sequence[Row]) -> Array:
        rows, others = (_matrix(some, features) for some in (learned, judged))
        lengths = lengths_of(learned)
        weights = np.linalg.lstsq(rows, lengths, rcond=None)[0]
        return _around(others @ weights, lengths - rows @ weights)

    return step


def _perceptron(learned: Sequence[Row], judged: Sequence[Row]) -> Array:
    """The paper's: 100-200-200-100 on the six scores, mean squared error (section V). It knows the
    rows that it learned from too well, so its errors are those on a fifth that it did not see."""
    order = np.random.default_rng(0).permutation(len(learned))
    apart, learned = (
        [learned[place] for place in some] for some in np.split(order, [len(order) // FOLDS])
    )
    points = _regressed(learned, [*apart, *judged])
    return _around(points[len(apart) :], lengths_of(apart) - points[: len(apart)])


def _regressed(learned: Sequence[Row], judged: Sequence[Row]) -> Array:
    """Points of the paper's perceptron."""
    torch.manual_seed(0)
    rows, others = (np.array([row.scores for row in some]) for some in (learned, judged))
    mean, scale = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    inputs = torch.tensor((rows - mean) / scale, dtype=torch.float32)
    lengths = lengths_of(learned)
    targets = torch.tensor(lengths / lengths.mean(), dtype=torch.float32)
    sizes = (inputs.shape[1], *_PAPER_LAYERS)
    layers = [
        layer
        for before, after in pairwise(sizes)
        for layer in (torch.nn.Linear(before, after), torch.nn.ReLU())
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(sizes[-1], 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=_PAPER_RATE)
    for _ in range(_PAPER_EPOCHS):
        for some in torch.randperm(len(inputs)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[some])[:, 0], targets[some]).backward()
            optimizer.step()
    with torch.inference_mode():
        there = torch.tensor((others - mean) / scale, dtype=torch.float32)
        points: Array = model(there)[:, 0].numpy().astype(float) * lengths.mean()
    return points


def _network(features: Callable[[Row], Sequence[float]]) -> Step:
    """The server's, on these features."""

    def step(learned: Sequence[Row], judged: Sequence[Row]) -> Array:
        rows, others = (np.array([features(row) for row in some]) for some in (learned, judged))
        return fit(rows, lengths_of(learned)).predict(others)

    return step


def _of_states(hidden: States, more: Callable[[Row], Sequence[float]]) -> Step:
    """The server's network on the main components of the hidden states."""

    def step(learned: Sequence[Row], judged: Sequence[Row]) -> Array:
        found = [
            np.array([hidden[row.key] for row in some], np.float64) for some in (learned, judged)
        ]
        middle, spread = found[0].mean(axis=0), found[0].std(axis=0) + 1e-6
        standard = [(states - middle) / spread for states in found]
        _, _, axes = np.linalg.svd(standard[0], full_matrices=False)
        main = [states @ axes[:_COMPONENTS].T for states in standard]
        rows, others = (
            np.hstack([states, np.array([more(row) for row in some]).reshape(len(some), -1)])
            for states, some in zip(main, (learned, judged), strict=True)
        )
        return fit(rows, lengths_of(learned), shape=Shape(epochs=20)).predict(others)

    return step


def _around(points: Array, errors: Array) -> Array:
    """Quantiles of a predictor that gives points."""
    return points[:, None] + np.quantile(errors, LEVELS)[None, :]


def _matrix(rows: Sequence[Row], features: Callable[[Row], Sequence[float]]) -> Array:
    return np.array([[1.0, *features(row)] for row in rows])


def _nothing(row: Row) -> Sequence[float]:
    return ()


def _input_length(row: Row) -> Sequence[float]:
    return (float(row.input_tokens),)


def _scores(row: Row) -> Sequence[float]:
    return row.scores


def _single_rule(row: Row) -> Sequence[float]:
    return (Uncertainty(*row.scores).single_rule(row.input_tokens),)


def _lexical(row: Row) -> Sequence[float]:
    return tuple(features_of(asked_of(row)).tolist())
