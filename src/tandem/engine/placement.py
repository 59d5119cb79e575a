"""Which engine of a group a request belongs to, chosen once, before it begins.

Knows requests and the numbers of engines, not the engines. Invariant: equal requests in equal order
get equal places.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.slo import WorkClass

MAIN = 0
"""The number of the main engine."""

# Predictions that the threshold is taken from, and how many there must be.
_RECENT, _LEAST = 1024, 32


class Placement(Protocol):
    """The seam between a group and the rule that divides requests among its engines."""

    def place(self, request: Request, able: Sequence[int]) -> int:
        """One of `able`, the numbers of the engines that can take `request` now, in order.

        Called once for every request, in order of arrival, so a rule may learn from what it is
        shown. `MAIN` is always in `able`.
        """
        ...


def overflow(quantile: float, tokens: float) -> Placement:
    """`Above` these tokens, or, if they are 0, above this quantile of recent predictions."""
    return Above(tokens) if tokens else Overflow(quantile)


class Above:
    """Strategic offloading of RT-LM (IV-D, equation 4): an answer that is predicted to be longer
    than tau goes to the second engine, so that short answers do not wait behind it.

    u is the median of the predicted length. As in the paper, tau is fixed, so it stays where it is
    however many long answers come. A request of which nothing is predicted stays with the main
    engine.
    """

    def __init__(self, tokens: float) -> None:
        self._tokens = tokens

    def place(self, request: Request, able: Sequence[int]) -> int:
        """See `Placement`."""
        if request.length is None or uncertainty_of(request.length) <= self._tokens:
            return MAIN
        return _other(able)


class Overflow:
    """As `Above`, and tau is the `quantile` (the paper's k) of recent u: the traffic stands for the
    paper's training set. About a share of 1 - `quantile` moves, also of a flood of long answers.

    Each class of work has its own tau: the lines of a batch do not move that of chats.
    """

    def __init__(self, quantile: float = 0.9) -> None:
        self._quantile = quantile
        self._recent: dict[WorkClass, _Recent] = {each: _Recent() for each in WorkClass}

    def place(self, request: Request, able: Sequence[int]) -> int:
        """See `Placement`. The request's u is one of the recent ones from now on."""
        if request.length is None:
            return MAIN
        uncertainty = uncertainty_of(request.length)
        recent = self._recent[request.work_class]
        threshold = recent.quantile(self._quantile)
        recent.add(uncertainty)
        if uncertainty <= threshold:
            return MAIN
        return _other(able)


def _other(able: Sequence[int]) -> int:
    return next((number for number in able if number != MAIN), MAIN)


def uncertainty_of(length: Forecast) -> float:
    """RT-LM's u, in tokens: the median of what is predicted of the whole answer."""
    return length.quantile(0.5)


class _Recent:
    """The last values, in order of size, too."""

    def __init__(self) -> None:
        self._queue: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        self._queue.append(value)
        insort(self._sorted, value)
        if len(self._queue) > _RECENT:
            del self._sorted[bisect_left(self._sorted, self._queue.popleft())]

    def quantile(self, level: float) -> float:
        """See `quantile_of`; infinite if there are few."""
        return quantile_of(self._sorted, level) if len(self._sorted) >= _LEAST else math.inf


def quantile_of(ordered: Sequence[float], level: float) -> float:
    """Of rising values, the least that a share of `level` does not exceed. Of predictions of a
    training set that is equation 4."""
    return ordered[max(0, math.ceil(level * len(ordered)) - 1)]
