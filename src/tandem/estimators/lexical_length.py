"""Predicts the output length from the scores of the prompt's text, by adapter.

One network an adapter, made of its recent answers. `learned` is for a thread; all else is for
the thread that serves. Invariant: what is learned replaces a network whole, and memory is bounded.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tandem.core.lengths import Asked
from tandem.estimators.length_network import LengthNetwork, fit
from tandem.estimators.output_length import Quantiles

MOST_ADAPTERS = 64
_RECENT = 2048  # answers of an adapter
_FEWEST = 200  # that a network is made of
_AGAIN = 1.25  # it is made again when so many times as many have been seen


@dataclass(slots=True)
class _Adapter:
    rows: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    network: LengthNetwork | None = None
    seen: int = 0
    due: float = float(_FEWEST)  # `seen` at which it is made


class Lexical:
    """See `Predictor`; `learned` makes the networks that are `due`."""

    name = "lexical"

    def __init__(self) -> None:
        self._adapters: OrderedDict[str, _Adapter] = OrderedDict()

    def predict(self, asked: Asked) -> Quantiles | None:
        """See `Predictor`."""
        known = self._adapters.get(asked.adapter)
        if known is None or known.network is None or not asked.scores:
            return None
        features = np.array([features_of(asked)])
        tokens = np.minimum(known.network.predict(features)[0], asked.max_tokens)
        return tuple(tokens.tolist())

    def observe(self, asked: Asked, output_tokens: int) -> None:
        """See `Predictor`."""
        if not asked.scores or output_tokens < 1:
            return
        known = self._adapters.setdefault(asked.adapter, _Adapter())
        self._adapters.move_to_end(asked.adapter)
        known.rows.append((*features_of(asked), float(output_tokens)))
        known.seen += 1
        while len(self._adapters) > MOST_ADAPTERS:
            self._adapters.popitem(last=False)

    @property
    def due(self) -> list[str]:
        """Adapters whose network is to be made, or made again."""
        return [name for name, known in self._adapters.items() if known.seen >= known.due]

    def rows(self, adapter: str) -> list[tuple[float, ...]]:
        """A copy of the features and lengths that a network is made of, for `learned`."""
        known = self._adapters[adapter]
        # As long as there are fewer than are kept, each network has more to learn from; later it
        # follows what changes.
        known.due = known.seen + max(_FEWEST, min(known.seen, _RECENT) * (_AGAIN - 1.0))
        return list(known.rows)

    def take(self, adapter: str, network: LengthNetwork) -> None:
        """Use it from now on."""
        if adapter in self._adapters:
            self._adapters[adapter].network = network


def learned(rows: Iterable[tuple[float, ...]]) -> LengthNetwork:
    """The network of some rows; for a thread."""
    read = np.array(list(rows), dtype=np.float64)
    return fit(read[:, :-1], read[:, -1])


def features_of(asked: Asked) -> tuple[float, ...]:
    """The scores, the length of the input and the limit, of which long ones differ less."""
    scores = (math.log1p(score) for score in asked.scores)
    return (*scores, math.log(max(1, asked.input_tokens)), math.log(max(1, asked.max_tokens)))
