"""How many requests/s fit: the planner's answer, and what the engine says.

    python -m benchmarks planner                       # SmolLM2, ten minutes on the engine

The planner (Echo, section 5.4) answers by simulation over a profile of this machine. Here the same
recorded arrivals and lengths, stretched to several rates, also meet the engine. On both sides the
answer is the rate at which so many requests meet both objectives, between the rates that were
tried. Pieces of the profile are measured before each run of the engine and after the last. Exit
status 1 if the answers differ by more than `TOLERANCE`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks.planner.load import TRACE, loads, settings_of
from benchmarks.reporting.machine import describe, slug
from tandem.bench.measure import summarise
from tandem.bench.simulation import Training, arrivals_of, outcomes_of
from tandem.bench.workload import PlannedRequest
from tandem.build import build_executor, build_simulation, join_loop
from tandem.core.clock import SleepingClock, VirtualClock, WaitingClock
from tandem.core.slo import Slo
from tandem.engine.loop import EngineLoop
from tandem.profiler import Profiler
from tandem.sim.run import Simulation

RESULTS = Path(__file__).parents[1] / "results"
TOLERANCE = 0.15
STEP = 1.15  # between two rates
LEAST_RATE, MOST_RATE = 0.05, 100.0
# Share of its length after which a run is given up: what is left over is outside every objective.
PATIENCE = 1.5


@dataclass(frozen=True, slots=True)
class Point:
    """One rate, and the share of the requests inside both objectives."""

    rate: float
    attainment: float


def crossing(points: Sequence[Point], attainment: float) -> float:
    """The rate at which the share falls to `attainment`: between two neighbours, by logarithm.

    nan if it never does, or always has.
    """
    ordered = sorted(points, key=lambda point: point.rate)
    for below, above in pairwise(ordered):
        if below.attainment >= attainment > above.attainment:
            part = (below.attainment - attainment) / (below.attainment - above.attainment)
            return below.rate * math.exp(part * math.log(above.rate / below.rate))
    return math.nan


def search(measure: Callable[[float], float], attainment: float, start: float) -> list[Point]:
    """Points around the crossing: rates in steps, up while enough requests are inside, else
    down."""
    points = [Point(start, measure(start))]
    enough = points[0].attainment >= attainment
    while math.isnan(crossing(points, attainment)):
        rate = points[-1].rate * (STEP if enough else 1.0 / STEP)
        if not LEAST_RATE <= rate <= MOST_RATE:
            break
        points.append(Point(rate, measure(rate)))
    return points


def attained(
    loop: EngineLoop, clock: WaitingClock, load: Sequence[PlannedRequest], slo: Slo
) -> float:
    """Run the load; the share inside both objectives."""
    arrivals, _ = arrivals_of(load, Training(), loop.info.vocab_size, 0)
    last_s = max(load[-1].at_s, 1.0)
    report = Simulation(loop, clock, arrivals).run(until_s=PATIENCE * last_s)
    for name, each in report.outcomes.items():
        if not (each.finished or each.error):
            loop.abort(name)
    return summarise(outcomes_of(report), slo).goodput_share or 0.0


def main(
    model: Annotated[str, typer.Option(help="What is served.")] = "smollm2",
    trace: Annotated[Path, typer.Option(help="Recorded requests.")] = TRACE,
    seconds: Annotated[float, typer.Option(help="Of arrivals in each run of the engine.")] = 120.0,
    context: Annotated[int, typer.Option(help="Tokens a request may have, about.")] = 1024,
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token.")] = 2.0,
    tpot_slo: Annotated[float, typer.Option(help="Seconds a token after that.")] = 0.15,
    attainment: Annotated[float, typer.Option(help="Share of requests inside both.")] = 0.9,
    profile_seconds: Annotated[float, typer.Option(help="Of each piece of the profile.")] = 15.0,
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS,
) -> None:
    """Ask the planner and the engine."""
    console = Console(stderr=True)
    settings = settings_of(model, ttft_slo, tpot_slo)
    slo = Slo(ttft_slo, tpot_slo)
    executor = build_executor(settings, lambda stage, done: None)
    at = loads(trace, seconds, context, executor.info.vocab_size)
    profiler = Profiler(executor, settings)

    def simulate(rate: float) -> float:
        clock = VirtualClock()
        loop, _ = build_simulation(settings, profiler.profile(), clock)
        return attained(loop, clock, at(rate), slo)

    def serve(rate: float) -> float:
        clock = SleepingClock()
        loop = join_loop(settings, executor, clock=clock, rates=profiler.profile().rates)
        found = attained(loop, clock, at(rate), slo)
        console.print(f"engine, {rate:.2f} requests/s: {found:.1%} inside")
        profiler.run(profile_seconds, lambda done: None)
        return found

    profiler.run(profile_seconds, lambda done: None)
    first = crossing(search(simulate, attainment, 1.0), attainment)
    console.print(f"first answer of the planner: {first:.2f} requests/s")
    engine = search(serve, attainment, first)
    planner = search(simulate, attainment, first)
    answers = {
        "planner": crossing(planner, attainment),
        "engine": crossing(engine, attainment),
    }
    error = answers["planner"] / answers["engine"] - 1.0
    machine = describe("cpu", len(os.sched_getaffinity(0)))
    content = {
        "machine": machine,
        "model": model,
        "trace": trace.name,
        "seconds": seconds,
        "context": context,
        "slo": asdict(slo),
        "attainment": attainment,
        "points": {"planner": planner, "engine": engine},
        "first answer": first,
        "requests/s": answers,
        "error": error,
        "within": TOLERANCE,
    }
    out.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
    (out / f"planner-{slug(machine)}.json").write_bytes(text)
    print(text.decode())
    raise typer.Exit(0 if abs(error) <= TOLERANCE else 1)


if __name__ == "__main__":
    typer.run(main)
