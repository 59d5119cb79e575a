"""Which runs a place of the MACE comparison takes, and one row of figures for all rounds of a run.

By retrain rate, by load, and in order of arrival; what they cost is measured apart. Knows no
engine. Invariant: in a round everybody meets the same loads, one directly after the other and each
first in turn, so that a machine whose speed drifts does so for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import Any

from benchmarks.mace.runs import FIFO_VARIANTS, VARIANTS, Figures, Load, Scale, Variant, at_rate
from tandem.estimators.profile import Profile

# The retrain rate at which loads are compared, and scheduling is timed.
SWEEP_RATE = 0.2
# The parts of a sweep, and who runs in each.
PARTS = {"rates": VARIANTS, "loads": VARIANTS, "fifo": FIFO_VARIANTS}


@dataclass(frozen=True, slots=True)
class Run:
    """One variant under one load, for a part of the sweep."""

    part: str
    variant: Variant
    load: Load


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is run at a place: `retrain_rates` at the scale's own load (figures 5, 10, 11), `loads`
    as factors of that one (12), `fifo_rates` in order of arrival (13).

    All of it in `rounds`, each with loads of its own; the first has those of `seed`. Scheduling is
    timed in so many `timings`, of which the least counts.
    """

    scale: Scale
    profile: Profile
    retrain_rates: Sequence[float]
    loads: Sequence[float]
    fifo_rates: Sequence[float]
    seed: int = 0
    rounds: int = 1
    timings: int = 3

    @property
    def usual(self) -> Load:
        """The one under which scheduling is timed."""
        return self._load(SWEEP_RATE)

    def runs(self) -> list[Run]:
        """In the order in which they are made: of each load one variant after the other, beginning
        with another one each time."""
        found: list[Run] = []
        for round_ in range(self.rounds):
            for part, variants in PARTS.items():
                for place, load in enumerate(self._loads(part, round_)):
                    first = (round_ + place) % len(variants)
                    turn = variants[first:] + variants[:first]
                    found += [Run(part, variant, load) for variant in turn]
        return found

    def _loads(self, part: str, round_: int) -> list[Load]:
        if part == "loads":
            scales = [at_rate(self.scale, factor * self.scale.rate) for factor in self.loads]
            return [self._load(SWEEP_RATE, round_, scale) for scale in scales]
        rates = self.retrain_rates if part == "rates" else self.fifo_rates
        return [self._load(rate, round_) for rate in rates]

    def _load(self, retrain_rate: float, round_: int = 0, scale: Scale | None = None) -> Load:
        return Load(scale or self.scale, self.profile, retrain_rate, self.seed + round_)


def grouped(done: Sequence[tuple[Run, Figures]], part: str) -> list[list[Figures]]:
    """All rounds of each run of a part, in the order of the tables: by load, then by variant."""
    names = [variant.name for variant in PARTS[part]]
    groups: dict[tuple[float, float, int], list[Figures]] = {}
    for run, row in done:
        if run.part == part:
            key = row.retrain_rate, row.request_rate, names.index(row.variant)
            groups.setdefault(key, []).append(row)
    return [groups[key] for key in sorted(groups)]


def over_rounds(rows: Sequence[Figures]) -> Figures:
    """Of one run in all rounds: counts are sums, the others means; a round that could not tell
    (nan) does not count."""
    found: dict[str, Any] = {}
    for each in fields(Figures)[3:]:  # the first three say which run it is
        values = [getattr(row, each.name) for row in rows]
        if all(isinstance(value, int) for value in values):
            found[each.name] = sum(values)
        else:
            known = [value for value in values if not math.isnan(value)]
            found[each.name] = fmean(known) if known else math.nan
    return replace(rows[0], **found)


def unrest(groups: Sequence[Sequence[Figures]], name: str) -> float:
    """By what share rounds of a run differ in a figure: largest less smallest over their mean, the
    median of all runs; nan with one round."""
    spreads = []
    for rows in groups:
        values = [float(getattr(row, name)) for row in rows]
        if len(values) > 1 and fmean(values) > 0.0:  # not where nobody got that far (nan)
            spreads.append((max(values) - min(values)) / fmean(values))
    return median(spreads) if spreads else math.nan
