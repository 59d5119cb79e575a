"""Predicts the output length with networks, two an adapter (one for lines of batches), made of
recent answers: from the scores of the prompt's text, or from the prompt's last hidden state.

`learned` is for a thread; all else is for the thread that serves. Knows features, not what they
mean. Invariant: what is learned replaces a network whole, and memory is bounded.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tandem.core.lengths import Asked, Traffic
from tandem.estimators.length_network import LengthNetwork, Shape, fit
from tandem.estimators.output_length import Quantiles

Features = NDArray[np.float32]
MOST_NETWORKS = 64
_RECENT = 2048  # answers for a network
_FEWEST = 200  # that a network is made of
_AGAIN = 1.25  # it is made again when so many times as many have been seen


@dataclass(slots=True)
class _Known:
    rows: deque[tuple[Features, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    network: LengthNetwork | None = None
    seen: int = 0
    due: float = float(_FEWEST)  # `seen` at which it is made


class Learned:
    """See `Predictor`; `learned` makes the networks that are `due`.

    `features` of an answer of which too little is known are empty.
    """

    def __init__(self, name: str, features: Callable[[Asked], Features], shape: Shape) -> None:
        self.name = name
        self.shape = shape
        self._features = features
        self._traffic: OrderedDict[Traffic, _Known] = OrderedDict()

    def predict(self, asked: Asked) -> Quantiles | None:
        """See `Predictor`."""
        known = self._traffic.get(asked.traffic)
        if known is None or known.network is None:
            return None
        features = self._features(asked)
        if not features.size:
            return None
        return tuple(known.network.predict(features[None, :])[0].tolist())

    def observe(self, asked: Asked, output_tokens: int) -> None:
        """See `Predictor`."""
        features = self._features(asked)
        if not features.size or output_tokens < 1:
            return
        known = self._traffic.setdefault(asked.traffic, _Known())
        self._traffic.move_to_end(asked.traffic)
        known.rows.append((features, output_tokens))
        known.seen += 1
        while len(self._traffic) > MOST_NETWORKS:
            self._traffic.popitem(last=False)

    @property
    def due(self) -> list[Traffic]:
        """Whose network is to be made, or made again."""
        return [traffic for traffic, known in self._traffic.items() if known.seen >= known.due]

    def rows(self, traffic: Traffic) -> list[tuple[Features, int]]:
        """A copy of the features and lengths that a network is made of, for `learned`; none of
        traffic that others have displaced."""
        known = self._traffic.get(traffic)
        if known is None:
            return []
        # As long as there are fewer than are kept, each network has more to learn from; later it
        # follows what changes.
        known.due = known.seen + max(_FEWEST, min(known.seen, _RECENT) * (_AGAIN - 1.0))
        return list(known.rows)

    def take(self, traffic: Traffic, network: LengthNetwork) -> None:
        """Use it from now on."""
        if traffic in self._traffic:
            self._traffic[traffic].network = network


def learned(rows: Sequence[tuple[Features, int]], shape: Shape) -> LengthNetwork:
    """The network of some rows; for a thread."""
    features, lengths = zip(*rows, strict=True)
    return fit(np.array(features, np.float64), np.array(lengths, np.float64), shape=shape)


def by_text() -> Learned:
    """From the six scores, the length of the input, and the limit."""
    return Learned("lexical", features_of, Shape())


def by_state() -> Learned:
    """From the prompt's last hidden state and the limit: more features, fewer passes over them."""
    return Learned("hidden", state_of, Shape(epochs=20))


def features_of(asked: Asked) -> Features:
    """The scores, the length of the input and the limit, of which long ones differ less; empty
    without scores."""
    if not asked.scores:
        return np.empty(0, np.float32)
    scores = [math.log1p(score) for score in asked.scores]
    sizes = [math.log(max(1, asked.input_tokens)), math.log(max(1, asked.max_tokens))]
    return np.array([*scores, *sizes], np.float32)


def state_of(asked: Asked) -> Features:
    """What is kept of the hidden state, and the limit; empty before the state is known."""
    if not asked.state:
        return np.empty(0, np.float32)
    state = np.frombuffer(asked.state, np.float16).astype(np.float32)
    return np.append(state, np.float32(math.log(max(1, asked.max_tokens))))


class Projection:
    """Keeps `size` random mixtures of a hidden state's numbers, so that distances between states
    stay about as they are (Johnson and Lindenstrauss)."""

    def __init__(self, size: int = 64) -> None:
        self._size = size
        self._mix = np.empty((0, size), np.float32)

    def __call__(self, state: bytes) -> bytes:
        """Of a state in float16, `size` numbers in float16. The same state gives the same ones."""
        numbers = np.frombuffer(state, np.float16).astype(np.float32)
        if len(numbers) != len(self._mix):  # of another model
            drawn = np.random.default_rng(len(numbers)).standard_normal((len(numbers), self._size))
            self._mix = (drawn / math.sqrt(self._size)).astype(np.float32)
        kept: Features = np.clip(numbers @ self._mix, -6e4, 6e4)
        return kept.astype(np.float16).tobytes()
