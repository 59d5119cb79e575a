"""Predicts quantiles of the output length from finished answers of the same kind.

What finished answers had in common is their key: an adapter with an endpoint and a limit, or a
batch. Knows numbers and names only. Invariant: memory is bounded, whatever keys come.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tandem.core.lengths import LEVELS, Asked

MOST_KEYS = 256
_RECENT = 256  # answers of a key
_FEWEST = 16  # that say anything


Quantiles = tuple[float, ...]
"""Tokens at `LEVELS`."""


class Predictor(Protocol):
    """Learns from answers that ended."""

    name: str

    def predict(self, asked: Asked) -> Quantiles | None:
        """Of one answer, whatever its limit; None while too little is known."""
        ...

    def observe(self, asked: Asked, output_tokens: int) -> None:
        """An answer has ended by itself or at its limit."""
        ...


class History:
    """Quantiles of the recent answers with the same key; of the first of `keys` that has enough.

    A key of None has no history.
    """

    def __init__(self, name: str, keys: Sequence[Callable[[Asked], Hashable | None]]) -> None:
        self.name = name
        self._keys = tuple(keys)
        self._recent: OrderedDict[Hashable, _Recent] = OrderedDict()

    def predict(self, asked: Asked) -> Quantiles | None:
        """See `Predictor`."""
        for place, key in enumerate(self._keys):
            recent = self._recent.get((place, key(asked)))
            if recent is not None and len(recent.lengths) >= _FEWEST:
                return recent.quantiles()
        return None

    def observe(self, asked: Asked, output_tokens: int) -> None:
        """See `Predictor`."""
        for place, key_of in enumerate(self._keys):
            key = key_of(asked)
            if key is None:
                continue
            recent = self._recent.setdefault((place, key), _Recent())
            recent.add(output_tokens)
            self._recent.move_to_end((place, key))
        while len(self._recent) > MOST_KEYS:
            self._recent.popitem(last=False)


def by_traffic() -> History:
    """By adapter, endpoint and size of the limit, else by adapter, lines of batches apart; with
    little of either, chats and lines tell of each other."""
    return History("history", (_kind, _traffic, _adapter))


def by_batch() -> History:
    """By batch: its lines have much in common."""
    return History("batch", (lambda asked: (asked.batch, asked.adapter) if asked.batch else None,))


def _adapter(asked: Asked) -> Hashable:
    return asked.adapter


def _traffic(asked: Asked) -> Hashable:
    return asked.traffic


def _kind(asked: Asked) -> Hashable:
    return asked.traffic, asked.endpoint, asked.max_tokens.bit_length()


@dataclass(slots=True)
class _Recent:
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))
    known: Quantiles | None = None

    def add(self, length: int) -> None:
        self.lengths.append(length)
        self.known = None

    def quantiles(self) -> Quantiles:
        if self.known is None:
            self.known = tuple(np.quantile(self.lengths, LEVELS).tolist())
        return self.known


def pinball(quantiles: Quantiles, length: float) -> float:
    """Mean pinball loss at `LEVELS`, in tokens: what a quantile that is wrong costs."""
    losses = (
        max(level * (length - tokens), (level - 1.0) * (length - tokens))
        for level, tokens in zip(LEVELS, quantiles, strict=True)
    )
    return sum(losses) / len(LEVELS)


def pinballs(quantiles: NDArray[np.float64], lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same of many answers: [n, levels] and [n] to [n]."""
    short = lengths[:, None] - quantiles
    levels = np.array(LEVELS)
    loss: NDArray[np.float64] = np.maximum(levels * short, (levels - 1.0) * short).mean(axis=1)
    return loss
