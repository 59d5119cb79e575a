"""A load made of recorded answer lengths with forecasts: RT-LM's tasks and arrivals (V-A).

Forecasts come from the server's own network by cross-validation: no fold's network saw that answer
or one with equal features. Without prompt scores, only prompt size and limit are features. Knows no
policy. Invariant: a seed determines the load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from tandem.bench.traces import TraceRecord, read_trace
from tandem.core.errors import InvalidRequest
from tandem.core.lengths import LEVELS, Asked, Forecast
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.estimators.learned_length import features_of
from tandem.estimators.length_network import fit
from tandem.sim.run import Arrival

BETAS = tuple(range(10, 160, 10))
"""Arrival rates per minute. The load has one minute at each."""
MOST_ANSWERS = 4096
_FEWEST = 50
_FOLDS = 5
_MEDIAN = LEVELS.index(0.5)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's lengths in tokens, its limit `most`, and its forecast: quantiles at `LEVELS`."""

    input_tokens: int
    output_tokens: int
    most: int
    quantiles: tuple[float, ...]

    @property
    def expected(self) -> float:
        """Median forecast (RT-LM's u), in tokens."""
        return self.quantiles[_MEDIAN]


def read_answers(path: Path) -> list[Answer]:
    """The first answers of a trace or a file of lengths, with forecasts. Raises `InvalidRequest` if
    it cannot be read, has too few, or only requests that are alike."""
    records = read_trace(path, MOST_ANSWERS)
    if len(records) < _FEWEST:
        raise InvalidRequest(f"{path} has {len(records)} answers; at least {_FEWEST} are needed")
    longest = max(record.output_tokens for record in records)
    most = [record.max_tokens or longest for record in records]
    return [
        answer_of(record.prompt_tokens, record.output_tokens, limit, quantiles)
        for record, limit, quantiles in zip(records, most, _forecasts(records, most), strict=True)
    ]


def answer_of(
    input_tokens: int, output_tokens: int, most: int, quantiles: NDArray[np.float64]
) -> Answer:
    """An answer whose forecast quantiles are made non-decreasing and clipped to `most`."""
    rising = np.maximum.accumulate(np.clip(quantiles, 1.0, most))
    return Answer(input_tokens, output_tokens, most, tuple(rising.tolist()))


def times(unit_s: float, rng: Random) -> list[float]:
    """Poisson arrival times: a minute of 60 * `unit_s` at each rate of `BETAS`, shuffled."""
    found: list[float] = []
    for place, beta in enumerate(rng.sample(BETAS, len(BETAS))):
        at_s = rng.expovariate(beta / 60.0)
        while at_s < 60.0:
            found.append(unit_s * (60.0 * place + at_s))
            at_s += rng.expovariate(beta / 60.0)
    return found


def arrivals(answers: Sequence[Answer], at_s: Sequence[float], rng: Random) -> list[Arrival]:
    """Requests `task-N`. Answers are drawn without repetition; when they run out, drawing begins
    again."""
    order: list[Answer] = []
    while len(order) < len(at_s):
        order += rng.sample(list(answers), len(answers))
    pairs = zip(order, at_s, strict=False)
    return [arrival(answer, number, when) for number, (answer, when) in enumerate(pairs)]


def arrival(answer: Answer, number: int, at_s: float) -> Arrival:
    """One request `task-N` that makes this answer. Prompts of at least two tokens begin
    differently."""
    rest = ((7919 * (number + 1) + 31 * at) % 1000 for at in range(2, answer.input_tokens))
    prompt = (number % 1000, number // 1000, *rest)[: answer.input_tokens]
    sampling = SamplingParams(max_tokens=answer.output_tokens, temperature=0.0, ignore_eos=True)
    length = Forecast(answer.quantiles, answer.most, "lexical")
    return Arrival(at_s, Request(f"task-{number}", prompt, sampling, length=length))


def _forecasts(records: Sequence[TraceRecord], most: Sequence[int]) -> NDArray[np.float64]:
    """Quantiles [n, levels] by networks of the other folds. Raises `InvalidRequest` if there are no
    others: all requests are alike."""
    features = _features(records, most)
    lengths = np.array([record.output_tokens for record in records], dtype=np.float64)
    _, same = np.unique(features, axis=0, return_inverse=True)
    if not same.any():
        raise InvalidRequest("all of the file's requests are alike: no answer can be predicted")
    fold = (np.random.default_rng(0).permutation(same.max() + 1) % _FOLDS)[same.reshape(-1)]
    found = np.zeros((len(records), len(LEVELS)))
    for number in range(_FOLDS):
        apart = fold == number
        if apart.any():
            found[apart] = fit(features[~apart], lengths[~apart]).predict(features[apart])
    return found


def _features(records: Sequence[TraceRecord], most: Sequence[int]) -> NDArray[np.float64]:
    """Those of the server's network if all have scores, else the length of the input and the
    limit."""
    if all(record.scores for record in records):
        asked = [
            Asked("", "", limit, record.prompt_tokens, record.scores)
            for record, limit in zip(records, most, strict=True)
        ]
        return np.array([features_of(each) for each in asked], np.float64)
    sizes = [[record.prompt_tokens, limit] for record, limit in zip(records, most, strict=True)]
    return np.log(np.array(sizes, np.float64))
