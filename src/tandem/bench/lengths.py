"""Lengths of prompts and outputs in tokens: distributions named on the command line.

Knows nothing about arrivals or text. Invariant: a drawn length is at least 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Protocol

from tandem.core.errors import InvalidRequest


class Lengths(Protocol):
    """A distribution of lengths."""

    def draw(self, rng: Random) -> int:
        """One length in tokens, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant length."""

    tokens: int

    def draw(self, rng: Random) -> int:
        """The constant."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def draw(self, rng: Random) -> int:
        """A length of the range."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Log-normal with the given mean in tokens; `sigma` is the deviation of the logarithm."""

    mean: float
    sigma: float

    def draw(self, rng: Random) -> int:
        """A rounded length, at least 1."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(rng.lognormvariate(mu, self.sigma)))


FORMS = "N, fixed:N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA"


def parse_lengths(text: str) -> Lengths:
    """A distribution from one of `FORMS`. Raises `InvalidRequest`."""
    kind, *numbers = text.split(":")
    try:
        match kind, numbers:
            case "fixed", [tokens]:
                return _checked(Fixed(int(tokens)), int(tokens))
            case "uniform", [low, high]:
                if int(low) > int(high):
                    raise ValueError("LOW is above HIGH")
                return _checked(Uniform(int(low), int(high)), int(low))
            case "lognormal", [mean, sigma]:
                if float(sigma) < 0.0:
                    raise ValueError("SIGMA is negative")
                return _checked(Lognormal(float(mean), float(sigma)), float(mean))
            case _, []:
                return _checked(Fixed(int(kind)), int(kind))
            case _:
                raise ValueError("unknown form")
    except ValueError as error:
        raise InvalidRequest(f"lengths {text!r}: {error}; write {FORMS}") from error


def _checked(lengths: Lengths, smallest: float) -> Lengths:
    if smallest < 1:
        raise ValueError("a length must be at least 1")
    return lengths
