"""`tandem simulate`: what a policy would do to a load on a device that need not be there.

Turns flags into a workload, a profile and a simulated engine; shows what came out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tandem.bench.measure import Distribution
from tandem.bench.offline import read_batch
from tandem.bench.options import WorkloadOptions, build_workload
from tandem.bench.report import as_table
from tandem.bench.simulation import (
    SimulatedRun,
    Training,
    arrivals_of,
    describe,
)
from tandem.bench.timeline_figures import DrawnRun
from tandem.build import build_simulation
from tandem.config import Settings
from tandem.core.clock import VirtualClock
from tandem.core.errors import InvalidRequest
from tandem.core.lengths import LEVELS, Forecast
from tandem.core.request import Request
from tandem.core.slo import Slo
from tandem.core.training import TrainerSpec
from tandem.engine.placement import MAIN, overflow
from tandem.estimators.datasheet import load_profile
from tandem.estimators.profile import Profile, on_share
from tandem.sim.curves import read_curve
from tandem.sim.group import divide, together
from tandem.sim.run import SimReport, Simulation
from tandem.sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What is simulated. A `profile` is a file, or DEVICE:SHAPE of the data sheets; a `loss_curve`
    the file of a recorded run, without which the loss follows a model. `overflow` is a second
    engine: a profile, or a share of the device, which the main engine then lacks (empty: none)."""

    profile: str
    workload: WorkloadOptions
    training: Training
    timeline: bool = False
    noise: bool = True
    loss_curve: Path | None = None
    batch: Path | None = None  # offline requests, from the beginning on
    overflow: str = ""
    overflow_quantile: float = 0.9
    overflow_tokens: int = 0  # 0: by the quantile


def simulate(
    settings: Settings, options: SimulateOptions, console: Console
) -> tuple[SimulatedRun, SimReport, Timeline]:
    """Plan the load, run it, and describe it. Raises `InvalidRequest`."""
    profiles = profiles_of(options)
    workload = options.workload
    planned = build_workload(workload)
    arrivals, trainers = arrivals_of(planned, options.training, workload.vocabulary, workload.seed)
    offline = read_batch(options.batch, workload.vocabulary) if options.batch else []
    run, timeline = _engine(settings, options, profiles[MAIN], trainers, offline)
    others = [_engine(settings, options, each)[0] for each in profiles[MAIN + 1 :]]
    placement = overflow(options.overflow_quantile, options.overflow_tokens)
    end_s = planned[-1].at_s
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(settings.scheduling.policy, total=max(end_s, 1e-9))
        began = time.perf_counter()
        divide(arrivals, placement, [run, *others], _as_known)
        report = run.run(on_progress=lambda now: progress.update(task, completed=min(now, end_s)))
        for other in others:
            report = together(report, other.run())
        real_s = time.perf_counter() - began
    scheduling = settings.scheduling
    found = describe(
        scheduling.policy,
        options.profile,
        report,
        timeline.moments,
        real_s,
        Slo(scheduling.ttft_slo, scheduling.tpot_slo),
        {
            "requests": len(planned),
            "policy_options": dict(scheduling.policy_options),
            "loss_curve": str(options.loss_curve or "model"),
            "batch": str(options.batch or ""),
            "overflow": options.overflow,
        },
    )
    return found, report, timeline


def profiles_of(options: SimulateOptions) -> list[Profile]:
    """Of the main engine and, if there is one, the overflow engine. Raises `InvalidRequest`."""
    profile = load_profile(options.profile)
    if not options.overflow:
        return [profile]
    try:
        share = float(options.overflow)
    except ValueError:
        return [profile, load_profile(options.overflow)]
    if not 0.0 < share < 1.0:
        raise InvalidRequest(f"--overflow {options.overflow}: a share is between 0 and 1")
    return [on_share(profile, 1.0 - share), on_share(profile, share)]


def _engine(
    settings: Settings,
    options: SimulateOptions,
    profile: Profile,
    trainers: Sequence[TrainerSpec] = (),
    offline: Sequence[Request] = (),
) -> tuple[Simulation, Timeline]:
    """One engine on a clock of its own, to which nothing has come yet."""
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    loop, executor = build_simulation(
        settings,
        profile,
        clock,
        curve=read_curve(options.loss_curve) if options.loss_curve is not None else None,
        noise=options.noise,
        seed=options.workload.seed,
        on_plan=timeline if options.timeline else None,
    )
    leaps = None if options.timeline else executor
    return Simulation(loop, clock, [], trainers, leaps=leaps, offline=iter(offline)), timeline


def _as_known(request: Request) -> Request:
    """With its length, for the placement: the most that a prediction could tell it."""
    tokens = request.sampling.max_tokens
    return replace(request, length=Forecast((float(tokens),) * len(LEVELS), tokens, "known"))


def show(found: SimulatedRun, console: Console) -> None:
    """The tables of a run."""
    console.print(as_table(found.summary))
    table = Table("figure", "value", show_header=False)
    table.add_row("policy, profile", f"{found.policy}, {found.profile}")
    table.add_row("iterations", str(found.iterations))
    table.add_row("simulated", f"{found.simulated_s:.1f} s in {found.real_s:.1f} s")
    table.add_row("speed", f"{found.speedup:.0f} times real time")
    table.add_row("prompt tokens from the cache", f"{found.cached_share:.1%}")
    if found.steps:
        table.add_row("training steps", str(found.steps))
        first, last = found.losses[0], found.losses[-1]
        table.add_row("their loss", f"{first.loss:.3f} to {last.loss:.3f} at {last.at_s:.1f} s")
    if found.training_tokens_s:
        table.add_row("training tokens/s", f"{found.training_tokens_s:.1f}")
    if found.offline is not None:
        table.add_row("batch lines", f"{found.offline.completed} of {found.offline.requests}")
        table.add_row("their output tokens/s", f"{found.offline.output_token_rate:.1f}")
    if found.busy_share:
        table.add_row("device busy", f"{found.busy_share:.1%}")
    console.print(table)


def compare(found: Sequence[SimulatedRun], console: Console) -> None:
    """Policies beside each other: a row a figure, a column a policy."""
    table = Table("", *(each.policy for each in found))
    for figure, value in _COMPARED.items():
        cells = [value(each) for each in found]
        if any(cells):
            table.add_row(figure, *cells)
    console.print(table)


def _milliseconds(found: Distribution | None, share: str) -> str:
    if found is None:
        return ""
    return f"{1e3 * {'p50': found.p50, 'p99': found.p99}[share]:.1f}"


_COMPARED: dict[str, Callable[[SimulatedRun], str]] = {
    "requests complete": lambda run: f"{run.summary.completed} of {run.summary.requests}",
    "inside both objectives": lambda run: (
        "" if run.summary.goodput_share is None else f"{run.summary.goodput_share:.1%}"
    ),
    "to the first token, p50 (ms)": lambda run: _milliseconds(run.summary.ttft, "p50"),
    "to the first token, p99 (ms)": lambda run: _milliseconds(run.summary.ttft, "p99"),
    "per output token, p50 (ms)": lambda run: _milliseconds(run.summary.tpot, "p50"),
    "per output token, p99 (ms)": lambda run: _milliseconds(run.summary.tpot, "p99"),
    "output tokens/s": lambda run: f"{run.summary.output_token_rate:.1f}",
    "batch lines complete": lambda run: f"{run.offline.completed}" if run.offline else "",
    "their output tokens/s": lambda run: (
        f"{run.offline.output_token_rate:.1f}" if run.offline else ""
    ),
    "training steps": lambda run: f"{run.steps}" if run.steps else "",
    "training tokens/s": lambda run: (
        f"{run.training_tokens_s:.1f}" if run.training_tokens_s else ""
    ),
    "device busy": lambda run: f"{run.busy_share:.1%}" if run.busy_share else "",
    "simulated (s)": lambda run: f"{run.simulated_s:.1f}",
}


def drawn_of(found: SimulatedRun, report: SimReport, timeline: Timeline, stem: str) -> DrawnRun:
    """What the pictures of a run show."""
    title = f"{found.policy} on {found.profile}: {found.summary.requests} requests"
    outcomes = list(report.outcomes.values())
    return DrawnRun(title, stem, outcomes, timeline.moments, report.occupancy)
