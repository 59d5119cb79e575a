"""One run of the study: a policy under a load, simulated to the end of its last task.

Knows no table. Invariant: runs with the same load have the same tasks at the same times, so that
their response times can be compared task by task.
"""

from __future__ import annotations

import math
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import Any

from tandem.bench.answers import Answer, arrivals, times
from tandem.build import build_simulation
from tandem.cli.tune import unit_s
from tandem.config import Settings, resolve
from tandem.core.clock import VirtualClock
from tandem.engine.placement import Above, Placement
from tandem.estimators.batching import Batching
from tandem.estimators.profile import Profile, on_share
from tandem.sim.group import divide, together
from tandem.sim.run import Arrival, Simulation

BATCHING = ("fifo", "hpf", "luf", "muf", "rt_lm")
"""Policies that may have static batches."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a run is: a load (`tasks`, `busy`, `seed`), and a policy with its batches."""

    study: str
    tasks: str
    busy: float
    seed: int
    policy: str
    static: bool

    @property
    def load(self) -> tuple[str, str, float, int]:
        """Of runs with the same one, the tasks can be compared."""
        return self.study, self.tasks, self.busy, self.seed


@dataclass(frozen=True, slots=True)
class Run:
    """Response times in seconds by task, of those that count; finished tasks a minute; and thread
    seconds of scheduling a task (0 unless it was measured)."""

    case: Case
    response_s: dict[str, float]
    per_minute: float
    schedule_s: float = 0.0
    ended_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """Mean response time."""
        return fmean(self.response_s.values())

    @property
    def most_s(self) -> float:
        """Maximum response time."""
        return max(self.response_s.values())

    def quantile(self, share: float) -> float:
        """Of the response times, the one that a share of them is below."""
        ordered = sorted(self.response_s.values())
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def only(self, names: Container[str]) -> Run:
        """The same run, of these tasks."""
        kept = {name: each for name, each in self.response_s.items() if name in names}
        return replace(self, response_s=kept, per_minute=60.0 * len(kept) / self.ended_s)

    def summary(self) -> dict[str, Any]:
        """What the file keeps of it."""
        shares = (0.05, 0.25, 0.5, 0.75, 0.95)
        return {
            "study": self.case.study,
            "tasks": self.case.tasks,
            "busy": self.case.busy,
            "seed": self.case.seed,
            "policy": self.case.policy,
            "static": self.case.static,
            "mean_s": round(self.mean_s, 4),
            "most_s": round(self.most_s, 4),
            "quantiles_s": [round(self.quantile(share), 4) for share in shares],
            "per_minute": round(self.per_minute, 3),
            "schedule_s": self.schedule_s,
        }


@dataclass(frozen=True, slots=True)
class Beside:
    """An overflow engine: what it gets, and its share of the device, which the main one lacks."""

    placement: Placement
    share: float


@dataclass(frozen=True)
class Device:
    """What all runs have in common."""

    profile: Profile
    batching: Batching
    max_batch_tokens: int

    def times(self, tasks: Sequence[Answer], busy: float, rng: Random) -> list[float]:
        """The paper's arrivals, so that the mean load is `busy` times what full batches serve of
        these tasks."""
        return times(unit_s(self.batching, tasks, busy), rng)

    def load(self, tasks: Sequence[Answer], busy: float, seed: int) -> list[Arrival]:
        """The same for all policies."""
        rng = Random(seed)
        return arrivals(tasks, self.times(tasks, busy, rng), rng)

    def run(
        self,
        case: Case,
        load: list[Arrival],
        policy: str,
        options: Mapping[str, str],
        *,
        beside: Beside | None = None,
        timed: bool = False,
    ) -> Run:
        """Run it, with one engine on the whole device or another one `beside` it. `timed` runs
        measure scheduling, and take each iteration by itself."""
        if policy in BATCHING:
            options = {"static": str(case.static).lower(), **options}
        scheduling = {
            "policy": policy,
            "policy_options": dict(options),
            "max_batch_tokens": self.max_batch_tokens,
        }
        # Prompts share nothing. Not to look for their prefixes shortens runs by up to a third;
        # what is preempted computes its prompt again, which changes a mean by under 1%.
        cache = {"prefix_caching": timed}
        settings = resolve({"scheduling": scheduling, "cache": cache}, environ={})
        shares = [1.0] if beside is None else [1.0 - beside.share, beside.share]
        engines = [Engine(settings, on_share(self.profile, share), timed) for share in shares]
        placement = Above(math.inf) if beside is None else beside.placement
        divide(load, placement, [each.simulation for each in engines])
        report, *others = [each.simulation.run() for each in engines]
        for other in others:
            report = together(report, other)
        done = report.outcomes
        assert all(each.finished for each in done.values()), "a task was not served"
        return Run(
            case,
            {name: each.last_s - each.arrival_s for name, each in done.items()},
            60.0 * len(done) / report.ended_s,
            sum(each.schedule_s for each in engines) / len(done) if timed else 0.0,
            report.ended_s,
        )


class Engine:
    """One simulated engine, to which nothing has come yet. A `timed` one measures scheduling."""

    def __init__(self, settings: Settings, profile: Profile, timed: bool) -> None:
        clock = VirtualClock()
        self._loop, executor = build_simulation(settings, profile, clock, noise=False)
        if timed:
            self._loop.timer = time.thread_time
        self.simulation = Simulation(self._loop, clock, [], leaps=None if timed else executor)

    @property
    def schedule_s(self) -> float:
        """Seconds of its scheduling: of the thread if it is timed."""
        return self._loop.stats().schedule_s
