"""The loads that candidates meet, those kept back, and what came of one run.

Requests and jobs are `tandem.bench.mace`'s, with objectives and with losses that differ. Invariant:
a run depends on the options, the workload and the seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from benchmarks.mace.engines import make_loop
from benchmarks.mace.runs import SCALES, SLO_FACTOR, Scale, Variant, load_of, objective
from tandem.core.clock import VirtualClock
from tandem.core.request import Request
from tandem.core.slo import Slo
from tandem.core.training import TrainerSpec, TrainingStep
from tandem.estimators.datasheet import load_profile
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import with_cache
from tandem.sim.run import Arrival, SimReport, Simulation
from tandem.sim.timeline import Timeline

SERVER, EDGE = SCALES
# Requests that are unanswered so long after the last arrival have missed any objective.
DRAIN_S = 20.0
_NEW_LOSS = 0.6931471805599453
_NEW_SHARE, _LEAST_LOSS = 0.5, 0.05


@dataclass(frozen=True, slots=True)
class Workload:
    """A load at a retrain rate; the first token is due within `slo_factor` times the forward of a
    mean prompt alone. `blocks` of KV cache, 0: what the device holds."""

    name: str
    scale: Scale
    retrain_rate: float
    blocks: int = 0
    slo_factor: float = SLO_FACTOR


@dataclass(frozen=True, slots=True)
class Run:
    """A workload with a seed."""

    workload: Workload
    seed: int


@dataclass(frozen=True, slots=True)
class Share:
    """Of one run: requests that met both objectives; jobs whose update was made before the last
    arrival, weighed by their loss."""

    workload: str
    goodput: float
    training: float


def _workload(
    name: str,
    rate: float,
    retrain_rate: float,
    blocks: int = 0,
    slo_factor: float = SLO_FACTOR,
    scale: Scale = SERVER,
    **changes: int,
) -> Workload:
    scale = replace(scale, name=name, rate=rate, **changes)
    return Workload(name, scale, retrain_rate, blocks, slo_factor)


SEARCH = tuple(
    Run(workload, seed)
    for workload in (
        _workload("half load", 6.0, 0.4),
        _workload("full load", 12.0, 0.2),
        _workload("overload", 12.0, 0.4, slo_factor=4 * SLO_FACTOR),
        _workload("small cache", 12.0, 0.2, blocks=768),
    )
    for seed in (1, 2)
)
HELD_OUT = tuple(
    Run(workload, seed)
    for workload in (
        _workload("between", 9.0, 0.3),
        _workload("heavier", 14.0, 0.3, slo_factor=4 * SLO_FACTOR),
        _workload("long", 5.0, 0.3, prompt_tokens=512, output_tokens=192),
        _workload("smaller cache", 9.0, 0.3, blocks=512, slo_factor=2 * SLO_FACTOR),
        _workload("edge", 1.5, 0.3, slo_factor=2 * SLO_FACTOR, scale=EDGE),
    )
    for seed in (11, 12, 13)
)


def fingerprint() -> str:
    """Changes with the definition of either set."""
    return hashlib.sha256(repr((SEARCH, HELD_OUT)).encode()).hexdigest()[:8]


def measure(policy: str, options: Mapping[str, str], run: Run) -> Share:
    """Simulate one run."""
    workload = run.workload
    profile = load_profile(workload.scale.profile)
    if workload.blocks:
        profile = with_cache(profile, workload.blocks)
    scale, latency = workload.scale, LatencyModel(profile.rates)
    slo = objective(scale, latency, scale.prompt_tokens, workload.slo_factor)
    arrivals, _ = load_of(scale, profile, workload.retrain_rate, run.seed)
    arrivals = _with_objectives(arrivals, slo, run.seed)
    clock = VirtualClock()
    loop = make_loop(Variant(policy, policy, options), profile, clock, Timeline(clock.now))
    trainers = [TrainerSpec(f"adapter-{number}") for number in range(scale.trainers)]
    end_s = scale.duration_s
    report = Simulation(loop, clock, arrivals, trainers).run(until_s=end_s + DRAIN_S)
    return Share(workload.name, _goodput(report), _trained(report, arrivals, end_s))


def _with_objectives(arrivals: Sequence[Arrival], slo: Slo, seed: int) -> list[Arrival]:
    """Requests with the objective; jobs of which half are new and half were trained on before."""
    rng = Random(f"{seed}/losses")
    found: list[Arrival] = []
    for arrival in arrivals:
        work = arrival.work
        if isinstance(work, Request):
            found.append(Arrival(arrival.at_s, replace(work, slo=slo)))
            continue
        new = rng.random() < _NEW_SHARE
        loss = _NEW_LOSS if new else rng.uniform(_LEAST_LOSS, _NEW_LOSS)
        found.append(Arrival(arrival.at_s, replace(work, urgency=loss)))
    return found


def _goodput(report: SimReport) -> float:
    outcomes = report.outcomes.values()
    good = sum(
        each.slo is not None and each.slo.met(each.ttft_s, each.tpot_s or 0.0) == "both"
        for each in outcomes
        if each.finished
    )
    return good / len(outcomes)


def _trained(report: SimReport, arrivals: Sequence[Arrival], end_s: float) -> float:
    """Weighed by loss: a job of a high one is worth more (MACE 4.1)."""
    losses = {
        arrival.work.step_id: arrival.work.urgency
        for arrival in arrivals
        if isinstance(arrival.work, TrainingStep)
    }
    done = [step.step_id for step in report.steps if step.applied and step.finished_s <= end_s]
    return sum(losses[step_id] for step_id in done) / sum(losses.values())
