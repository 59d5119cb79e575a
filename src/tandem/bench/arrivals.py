"""When requests arrive: seconds from the start of the load, never decreasing.

Knows nothing about the requests. Invariant: a process is an endless iterator that depends only on
its random generator, never on how fast a server answers (open loop).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from math import inf
from random import Random

from tandem.core.errors import InvalidRequest


def poisson(rate: float, rng: Random) -> Iterator[float]:
    """Independent arrivals at `rate` requests per second: exponential gaps."""
    _check(rate)
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


def constant(rate: float) -> Iterator[float]:
    """One arrival every `1 / rate` seconds, starting at 0."""
    _check(rate)
    return (index / rate for index in count())


def burst() -> Iterator[float]:
    """All arrivals at 0."""
    return repeat(0.0)


def replay(
    times_s: list[float], *, time_scale: float = 1.0, rate: float | None = None
) -> list[float]:
    """Recorded arrivals, from 0, stretched by `time_scale` or to a mean rate of `rate` per second.

    A `time_scale` of 2 takes twice as long. Raises `InvalidRequest` if a rate cannot be reached
    because all arrivals are at the same time.
    """
    if not times_s:
        return []
    first, span_s = times_s[0], times_s[-1] - times_s[0]
    if rate is not None:
        _check(rate)
        if span_s <= 0.0:
            raise InvalidRequest("the trace has one moment only and cannot be scaled to a rate")
        time_scale = (len(times_s) - 1) / span_s / rate
    if not 0.0 < time_scale < inf:
        raise InvalidRequest("the time scale must be positive and finite", param="time_scale")
    return [(at_s - first) * time_scale for at_s in times_s]


def _check(rate: float) -> None:
    if not 0.0 < rate < inf:  # nor is NaN
        raise InvalidRequest("the rate must be positive and finite", param="rate")
