"""SLO attainment and training throughput by policy near the capacity, in simulation.

    python benchmarks/attainment_simulated.py --capacity 25 --policy unified --policy ekya

The loads of `benchmarks/attainment.py`, with its trace, lengths, objectives and training that is
always on offer, over the real scheduler and a profile (by default a 60M model's on two cores with
AMX). Several stretches of the trace each; prints a Markdown table, attainment less `no_retrain`'s.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from attainment.figures import BASELINE
from attainment.workload import Workload
from tandem.bench.simulation import Training, arrivals_of, outcomes_of
from tandem.bench.traces import read_trace
from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.slo import Slo
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.estimators.profile import read_profile
from tandem.sim.curves import Saturating
from tandem.sim.executor import SimExecutor
from tandem.sim.run import Simulation

LOADS = (0.3, 0.6, 0.9)
TRACE = Path("traces") / "azure_llm_2023_conv.csv.gz"
PROFILE = Path(__file__).parent / "attainment" / "llama-60m-amx.profile.json"
CONTEXT = 2048
STEP_TOKENS = 512


@dataclass(frozen=True)
class Plan:
    """What is the same in all runs; `capacity` in requests/s, `seconds` of arrivals in each."""

    profile: Path
    data: Path
    capacity: float
    seconds: float
    stretches: int
    slo: Slo
    guessed: bool
    length_scale: float


@dataclass(frozen=True)
class Found:
    """Of one run: percent of the requests, and rows whose update was made, a second."""

    attained: float
    training_tokens_s: float


def simulate(plan: Plan, policy: str, load: float, stretch: int) -> Found:
    """One run; `policy` is NAME or NAME:OPTION=VALUE,..."""
    profile, clock, numbers = read_profile(plan.profile), VirtualClock(), count()
    records = read_trace(plan.data / TRACE)
    workload = Workload(records, CONTEXT, profile.info.vocab_size, length_scale=plan.length_scale)
    job = workload.open_loop(load * plan.capacity, plan.seconds, stretch, plan.stretches + 1)
    arrivals, _ = arrivals_of(job.requests(), Training(), profile.info.vocab_size, stretch)
    name, _, options = policy.partition(":")
    given = dict(option.split("=", 1) for option in options.split(",") if option)
    executor = SimExecutor(profile, clock, curve=Saturating(), seed=stretch)
    scheduling = {
        "policy": name,
        "policy_options": given,
        "ttft_slo": plan.slo.ttft_s,
        "tpot_slo": plan.slo.tpot_s,
    }
    rates = None if plan.guessed else profile.rates
    loop = join_loop(resolve({"scheduling": scheduling}), executor, clock=clock, rates=rates)
    supply = None if name == BASELINE else lambda: _step(next(numbers))
    trainers = [TrainerSpec("learner")]
    report = Simulation(loop, clock, arrivals, trainers, leaps=executor, supply=supply).run()
    met = [each.meets(plan.slo) for each in outcomes_of(report)]
    rows = len(report.steps) * 2 * (STEP_TOKENS - 1)
    return Found(100.0 * sum(met) / len(met), rows / clock.now())


def _step(number: int) -> TrainingStep:
    """As those of `attainment.engine`."""
    group = tuple(TrainingSequence(tuple(range(STEP_TOKENS)), 1, Role.TARGET) for _ in range(2))
    return TrainingStep(f"step-{number}", "learner", LossSpec(LossKind.SFT), (group,))


def table(plan: Plan, policies: list[str]) -> Iterator[str]:
    """Rows of the table, the baseline's first."""
    runs = list(product([BASELINE, *policies], LOADS, range(plan.stretches)))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = dict(
            zip(runs, pool.map(partial(simulate, plan), *zip(*runs, strict=True)), strict=True)
        )
    yield "| policy | " + " | ".join(f"{load:.0%}" for load in LOADS) + " |"
    yield "|---" * (1 + len(LOADS)) + "|"
    for policy in [BASELINE, *policies]:
        cells = []
        for load in LOADS:
            own = [found[policy, load, stretch] for stretch in range(plan.stretches)]
            base = [found[BASELINE, load, stretch] for stretch in range(plan.stretches)]
            if policy == BASELINE:
                cells.append(f"{fmean(each.attained for each in own):.1f}")
                continue
            less = [a.attained - b.attained for a, b in zip(own, base, strict=True)]
            trained = fmean(each.training_tokens_s for each in own)
            cells.append(f"{fmean(less):+.1f} ({min(less):+.1f}), {trained:.0f}")
        yield f"| {policy} | {' | '.join(cells)} |"


def main(
    policy: Annotated[list[str], typer.Option(help="NAME or NAME:OPTION=VALUE,...; repeatable.")],
    capacity: Annotated[float, typer.Option(help="Requests/s that 100% stands for.")] = 25.0,
    seconds: Annotated[float, typer.Option(help="Of arrivals, in each run.")] = 90.0,
    stretches: Annotated[int, typer.Option(help="Of the trace, for each policy and load.")] = 4,
    ttft_slo: Annotated[float, typer.Option(help="Seconds.")] = 0.099,
    tpot_slo: Annotated[float, typer.Option(help="Seconds.")] = 0.038,
    guessed: Annotated[bool, typer.Option(help="The scheduler is not told the profile.")] = False,
    length_scale: Annotated[float, typer.Option(help="Of the trace's lengths.")] = 0.25,
    profile: Annotated[Path, typer.Option(help="A file of `tandem profile`.")] = PROFILE,
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
) -> None:
    """Simulate every policy; mean over the stretches, in brackets the worst; training tokens/s."""
    if not (data / TRACE).is_file():
        raise SystemExit(f"skipped: no shared data at {data}")
    slo = Slo(ttft_slo, tpot_slo)
    plan = Plan(profile, data, capacity, seconds, stretches, slo, guessed, length_scale)
    for row in table(plan, policy):
        typer.echo(row)


if __name__ == "__main__":
    typer.run(main)
