"""What the search may turn: ranges, defaults, and the options that follow from them.

A dial is what changes a policy apart from the others: of MACE's priorities only differences count,
of its weights only their ratio. Knows no load and no figures. Invariant: the options of every point
within the ranges are allowed by the policy, and those of `defaults` are the policy's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

Point = Mapping[str, float]
"""A value for each dial of a policy."""

# Where a dial stands when it is turned alone, as parts of its range.
_ALONE = (0.05, 0.35, 0.65, 0.95)


@dataclass(frozen=True, slots=True)
class Dial:
    """A number between `low` and `high`; a part of its range is one of its logarithm, unless
    `even`. `whole` numbers are rounded, others to three digits."""

    default: float
    low: float
    high: float
    even: bool = False
    whole: bool = False

    def at(self, part: float) -> float:
        """The value at a part of the range, 0 to 1."""
        if self.even:
            value = self.low + part * (self.high - self.low)
        else:
            value = self.low * (self.high / self.low) ** part
        return float(round(value)) if self.whole else float(f"{value:.3g}")

    def part(self, value: float) -> float:
        """Where in the range a value lies."""
        if self.even:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low)


DIALS: dict[str, dict[str, Dial]] = {
    "mace": {
        "pi_decode - pi_prefill": Dial(1.0, 0.05, 5.0),
        "pi_prefill - pi_ft": Dial(1.0, 0.05, 5.0),
        "delta_ft": Dial(0.1, 0.01, 3.0),
        "delta_prefill / delta_ft": Dial(0.5, 0.05, 0.95, even=True),
        "delta_decode / delta_prefill": Dial(0.2, 0.05, 0.95, even=True),
        "gamma": Dial(0.3, 0.03, 3.0),
        "lambda_latency / lambda_memory": Dial(1.0, 0.01, 100.0),
        "tau_memory": Dial(0.95, 0.3, 1.0, even=True),
        "tau_tasks": Dial(256, 8, 512, whole=True),
    },
    "unified": {
        "ceiling_s": Dial(0.25, 0.03, 1.0),
        "min_share": Dial(0.002, 0.0005, 0.5),
        "patience_s": Dial(30.0, 1.0, 300.0),
        "training_weight": Dial(8.0, 0.5, 128.0),
    },
}


def options_of(policy: str, point: Point) -> dict[str, str]:
    """The policy's options at a point."""
    if policy != "mace":
        return {name: f"{value:g}" for name, value in point.items()}
    prefill = 1.0 + point["pi_prefill - pi_ft"]
    delta_prefill = point["delta_ft"] * point["delta_prefill / delta_ft"]
    options = {
        "pi_ft": 1.0,
        "pi_prefill": prefill,
        "pi_decode": prefill + point["pi_decode - pi_prefill"],
        "delta_ft": point["delta_ft"],
        "delta_prefill": delta_prefill,
        "delta_decode": delta_prefill * point["delta_decode / delta_prefill"],
        "gamma": point["gamma"],
        "lambda_memory": 1.0,
        "lambda_latency": point["lambda_latency / lambda_memory"],
        "tau_memory": point["tau_memory"],
        "tau_tasks": point["tau_tasks"],
    }
    return {name: f"{value:.6g}" for name, value in options.items()}


def defaults(policy: str) -> Point:
    """The values that the policy has by itself."""
    return {name: dial.default for name, dial in DIALS[policy].items()}


def one_at_a_time(policy: str) -> Iterator[Point]:
    """Each dial at four places of its range, the others at their defaults."""
    for name, dial in DIALS[policy].items():
        for part in _ALONE:
            yield {**defaults(policy), name: dial.at(part)}


def drawn(policy: str, count: int, seed: int) -> Iterator[Point]:
    """Points anywhere in all ranges."""
    rng = Random(f"{policy}/{seed}")
    for _ in range(count):
        yield {name: dial.at(rng.random()) for name, dial in DIALS[policy].items()}


def stepped(policy: str, point: Point, name: str, step: float) -> Point:
    """`point` with one dial moved by a part of its range, within it."""
    dial = DIALS[policy][name]
    part = min(1.0, max(0.0, dial.part(point[name]) + step))
    return {**point, name: dial.at(part)}
