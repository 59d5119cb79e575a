"""Several predictors of the output length, of which the best one is believed.

Every predictor is scored on every answer that it predicted; the smallest mean pinball loss over the
recent answers of an adapter decides, apart for lines of batches. Knows no time and no text.
Invariant: a predictor without a record is believed only if no other has one.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.core.lengths import LEVELS, Asked, Forecast, Traffic
from tandem.estimators.output_length import MOST_KEYS, Predictor, Quantiles, pinball

_MEMORY = 128  # answers that count
_FEWEST = 16  # that a predictor is judged by
_MEDIAN = LEVELS.index(0.5)


@dataclass(frozen=True, slots=True)
class Errors:
    """How good recent predictions were: mean pinball loss and mean absolute error of the median in
    tokens; shares of the answers inside the quantiles that should bound 50% and 90%."""

    pinball: float
    absolute: float
    inside_50: float
    inside_90: float


@dataclass(slots=True)
class _Record:
    """What recent predictions were worth, each as (pinball, absolute, inside 50%, inside 90%)."""

    recent: deque[tuple[float, float, bool, bool]] = field(
        default_factory=lambda: deque(maxlen=_MEMORY)
    )
    loss: float = 0.0  # sum of the pinball losses

    def add(self, quantiles: Quantiles, length: int) -> None:
        if len(self.recent) == _MEMORY:
            self.loss -= self.recent[0][0]
        low, lower, median, upper, high = quantiles
        missed = pinball(quantiles, length)
        within = lower <= length <= upper, low <= length <= high
        self.recent.append((missed, abs(median - length), *within))
        self.loss += missed

    @property
    def mean(self) -> float:
        if len(self.recent) < _FEWEST:
            return math.inf
        return self.loss / len(self.recent)

    def errors(self) -> Errors:
        columns = [sum(column) / len(self.recent) for column in zip(*self.recent, strict=True)]
        return Errors(*columns)


@dataclass(frozen=True, slots=True)
class Predicted:
    """What was said of an answer before it began: all predictors' quantiles, and the forecast of
    the one that is believed (None: nothing is known)."""

    asked: Asked
    quantiles: Mapping[str, Quantiles]
    forecast: Forecast | None


class LengthChoice:
    """`predictors` in the order in which they are believed while none has a record."""

    def __init__(self, predictors: Sequence[Predictor]) -> None:
        self._predictors = tuple(predictors)
        self._records: OrderedDict[Traffic, dict[str, _Record]] = OrderedDict()
        self._all: dict[str, _Record] = {}

    def predict(self, asked: Asked) -> Predicted:
        """What all predictors say, and which one is believed."""
        said = {each.name: each.predict(asked) for each in self._predictors}
        limit = float(asked.max_tokens)
        quantiles = {
            name: tuple(min(max(1.0, each), limit) for each in found)
            for name, found in said.items()
            if found is not None
        }
        if not quantiles:
            return Predicted(asked, {}, None)
        known = self._records.get(asked.traffic, {})
        best = min(quantiles, key=lambda name: known[name].mean if name in known else math.inf)
        return Predicted(asked, quantiles, Forecast(quantiles[best], asked.max_tokens, best))

    def observe(self, predicted: Predicted, output_tokens: int) -> None:
        """The answer has ended by itself or at its limit."""
        scope = predicted.asked.traffic
        known = self._records.setdefault(scope, {})
        self._records.move_to_end(scope)
        for name, quantiles in predicted.quantiles.items():
            for records in (known, self._all):
                records.setdefault(name, _Record()).add(quantiles, output_tokens)
        while len(self._records) > MOST_KEYS:
            self._records.popitem(last=False)
        for each in self._predictors:
            each.observe(predicted.asked, output_tokens)

    def errors(self) -> dict[str, Errors]:
        """Of each predictor, over the recent answers of all adapters."""
        return {name: record.errors() for name, record in self._all.items()}
