"""SLO attainment and training throughput by policy near the capacity, in simulation.

    python -m benchmarks attainment.simulated --capacity 25 --policy unified --policy ekya

The loads of `attainment`, with its trace, lengths, objectives and training that is always on offer,
over the real scheduler and a profile (by default a 60M model's on two cores with AMX). Several
stretches of the trace each; prints a Markdown table, attainment less `no_retrain`'s. With
`--offline`, so many offline requests are there from the start of each run and end with it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated

import typer

from benchmarks.attainment.figures import BASELINE
from benchmarks.attainment.workload import Workload
from tandem.bench.simulation import Training, arrivals_of, outcomes_of
from tandem.bench.traces import read_trace
from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo, WorkClass
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
from tandem.sim.run import Arrival, Simulation

LOADS = (0.3, 0.6, 0.9)
TRACE = Path("traces") / "azure_llm_2023_conv.csv.gz"
PROFILE = Path(__file__).parent / "llama-60m-amx.profile.json"
CONTEXT = 2048
OFFLINE = "offline"
# Of a run that is broken off, requests of the last seconds have no time to be answered.
_CUT_S = 5.0


@dataclass(frozen=True)
class Plan:
    """What is the same in all runs; `capacity` in requests/s, `seconds` of arrivals in each,
    of which the requests of the first `warm_up` do not count."""

    profile: Path
    data: Path
    capacity: float
    seconds: float
    warm_up: float
    stretches: int
    slo: Slo
    guessed: bool
    length_scale: float
    sequence_tokens: int
    offline: int


@dataclass(frozen=True)
class Found:
    """Of one run: percent of the online requests; rows whose update was made, and tokens of offline
    requests that ended, a second."""

    attained: float
    training_tokens_s: float
    offline_tokens_s: float


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
    supply = None if name == BASELINE else lambda: _step(next(numbers), plan.sequence_tokens)
    arrivals += _offline(plan.offline if name != BASELINE else 0, profile.info.vocab_size, stretch)
    trainers, until_s = [TrainerSpec("learner")], plan.seconds if plan.offline else math.inf
    simulation = Simulation(loop, clock, arrivals, trainers, leaps=executor, supply=supply)
    report = simulation.run(until_s)
    batch = [key for key in report.outcomes if key.startswith(OFFLINE)]
    others = [report.outcomes.pop(key) for key in batch]
    online = outcomes_of(report)
    counted = [each for each in online if plan.warm_up <= each.intended_s < until_s - _CUT_S]
    met = [each.meets(plan.slo) for each in counted]
    rows = len(report.steps) * 2 * (plan.sequence_tokens - 1)
    tokens = sum(each.prompt_tokens + each.output_tokens for each in others if each.finished)
    return Found(100.0 * sum(met) / len(met), rows / clock.now(), tokens / clock.now())


def _offline(number: int, vocabulary: int, seed: int) -> list[Arrival]:
    """Prompts of 200 to 1,200 tokens, answers of 20 to 150."""
    random, found = Random(seed), []
    for place in range(number):
        prompt = tuple(random.choices(range(vocabulary), k=random.randint(200, 1200)))
        sampling = SamplingParams(max_tokens=random.randint(20, 150), ignore_eos=True)
        request = Request(f"{OFFLINE}-{place}", prompt, sampling, work_class=WorkClass.OFFLINE)
        found.append(Arrival(0.0, request))
    return found


def _step(number: int, tokens: int) -> TrainingStep:
    """As those of `benchmarks.attainment.engine`."""
    group = tuple(TrainingSequence(tuple(range(tokens)), 1, Role.TARGET) for _ in range(2))
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
            cell = f"{fmean(less):+.1f} ({min(less):+.1f})"
            cell += f", {fmean(each.training_tokens_s for each in own):.0f}"
            if plan.offline:
                cell += f", {fmean(each.offline_tokens_s for each in own):.0f}"
            cells.append(cell)
        yield f"| {policy} | {' | '.join(cells)} |"


def main(
    policy: Annotated[list[str], typer.Option(help="NAME or NAME:OPTION=VALUE,...; repeatable.")],
    capacity: Annotated[float, typer.Option(help="Requests/s that 100% stands for.")] = 25.0,
    seconds: Annotated[float, typer.Option(help="Of arrivals, in each run.")] = 90.0,
    warm_up: Annotated[
        float, typer.Option(min=0.0, help="Seconds of arrivals whose requests do not count.")
    ] = 0.0,
    stretches: Annotated[int, typer.Option(help="Of the trace, for each policy and load.")] = 4,
    ttft_slo: Annotated[float, typer.Option(help="Seconds.")] = 0.099,
    tpot_slo: Annotated[float, typer.Option(help="Seconds.")] = 0.038,
    guessed: Annotated[bool, typer.Option(help="The scheduler is not told the profile.")] = False,
    length_scale: Annotated[float, typer.Option(help="Of the trace's lengths.")] = 0.25,
    sequence_tokens: Annotated[
        int, typer.Option(min=2, help="Of each of the two sequences of a training step.")
    ] = 512,
    offline: Annotated[int, typer.Option(help="Offline requests, there from the start.")] = 0,
    profile: Annotated[Path, typer.Option(help="A file of `tandem profile`.")] = PROFILE,
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
) -> None:
    """Simulate every policy: mean over the stretches, in brackets the worst; training tokens/s;
    with `--offline` also tokens/s of offline requests."""
    if not (data / TRACE).is_file():
        raise SystemExit(f"skipped: no shared data at {data}")
    slo = Slo(ttft_slo, tpot_slo)
    if warm_up >= seconds - (_CUT_S if offline else 0.0):
        raise typer.BadParameter("nothing is left to count", param_hint="--warm-up")
    load = (capacity, seconds, warm_up, stretches)
    lengths = (length_scale, sequence_tokens)
    plan = Plan(profile, data, *load, slo, guessed, *lengths, offline)
    for row in table(plan, policy):
        typer.echo(row)


if __name__ == "__main__":
    typer.run(main)
