"""How long an answer will be, as far as it is known, and what is known of it before it begins.

Invariant: a quantile is at least 1, at most `max_tokens`, and never falls with the level; given
tokens that are made already, it is more than those, unless they are all that there may be.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Of the quantiles that are predicted; the first and last bound 90%, their neighbours 50%."""

# The longest answers are taken for at most so many times as long as the last quantile.
_BEYOND = 2.0


Traffic = tuple[str, bool]
"""An adapter ("": the base model), and whether its answers are lines of batches."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is known of an answer before it is computed. `scores` are those of its text, `batch` is
    the job whose line it is ("": none), `state` what is kept of the prompt's last hidden state
    (empty before it is computed)."""

    adapter: str
    endpoint: str
    max_tokens: int
    input_tokens: int
    scores: tuple[float, ...] = ()
    batch: str = ""
    state: bytes = b""

    @property
    def traffic(self) -> Traffic:
        """The answers that it is compared with."""
        return self.adapter, bool(self.batch)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of each choice of a request: `tokens` are quantiles at `LEVELS`, `source` is the predictor
    that gave them. An answer ends at `max_tokens` at the latest."""

    tokens: tuple[float, ...]
    max_tokens: int
    source: str

    def quantile(self, level: float, produced: int = 0) -> float:
        """Length of the whole answer, given that it is longer than `produced`: a share of `level`
        of such answers is at most so long."""
        if produced >= self.max_tokens:
            return float(self.max_tokens)
        lengths = self._points(produced)
        passed = _between(float(produced), lengths, _POINTS)
        asked = passed + level * (1.0 - passed)
        return min(max(_between(asked, _POINTS, lengths), produced + 1.0), float(self.max_tokens))

    def ends(self, produced: int = 0) -> list[tuple[float, float]]:
        """Lengths at which the answer may end, given that it is longer than `produced`, each with
        its probability: the ends of the ranges between the quantiles, in order."""
        first = bisect_right(self.tokens, produced)
        far = min(_BEYOND * max(self.tokens[-1], produced), float(self.max_tokens))
        if first == len(self.tokens):
            return [(max(far, float(produced)), 1.0)]
        left = 1.0 - _POINTS[first]
        places = (*self.tokens[first:], far)
        return [(each, share / left) for each, share in zip(places, _SHARES[first:], strict=True)]

    def _points(self, produced: int) -> tuple[float, ...]:
        last = max(self.tokens[-1], float(produced))
        return (0.0, *self.tokens, min(_BEYOND * last, float(self.max_tokens)))


_POINTS = (0.0, *LEVELS, 1.0)
_SHARES = tuple([high - low for low, high in pairwise(_POINTS)])


def _between(at: float, xs: tuple[float, ...], ys: tuple[float, ...]) -> float:
    """The value at `at` of the line through points whose `xs` do not fall; the last of several
    that are at `at`."""
    place = bisect_right(xs, at)
    if place == 0:
        return ys[0]
    if place == len(xs):
        return ys[-1]
    share = (at - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + share * (ys[place] - ys[place - 1])
