"""`tandem bench fidelity`: how near the simulator comes to this machine; tables and a report."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tandem.bench.fidelity import SCHEMA, Figures, Steps, agree, compare, run_once
from tandem.bench.fidelity_report import FIGURES, PARTS, as_markdown, figure_rows, part_rows
from tandem.bench.lengths import FORMS, parse_lengths
from tandem.bench.machine import describe
from tandem.bench.options import Arrivals, WorkloadOptions, build_workload
from tandem.bench.simulation import Training, arrivals_of
from tandem.bench.workload import Limits
from tandem.build import build_executor, build_simulation, join_loop, resolve_model
from tandem.cli.flags import settings_from, takes_settings
from tandem.cli.output import refusals, with_folder
from tandem.config import Settings
from tandem.core.clock import SleepingClock, VirtualClock
from tandem.core.errors import InvalidRequest
from tandem.core.ports import Executor
from tandem.estimators.profile import Profile, profile_for
from tandem.profiler import Profiler
from tandem.sim.run import Arrival

# Arrivals of these seconds warm a model up before the first run.
_WARM_UP_S = 3.0


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """The load, how often each side meets it, and how long to measure where no profile is given:
    in equal pieces, before each real run and after the last."""

    workload: WorkloadOptions
    steps: Steps | None = None
    runs: int = 3
    profile_seconds: float = 60.0


@takes_settings
def fidelity_command(
    config: Annotated[Path | None, typer.Option(help="TOML file with settings")] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of arrivals, in each run.")] = 600.0,
    rate: Annotated[float, typer.Option(help="Requests/s, Poisson.")] = 2.0,
    prompt_tokens: Annotated[str, typer.Option(help=FORMS)] = "lognormal:256:0.6",
    output_tokens: Annotated[str, typer.Option(help=FORMS)] = "lognormal:64:0.6",
    train: Annotated[bool, typer.Option(help="SFT steps are there all the time.")] = False,
    step_tokens: Annotated[int, typer.Option(help="Of each of a step's two sequences.")] = 256,
    runs: Annotated[int, typer.Option(min=1, help="Of each side.")] = 3,
    profile_seconds: Annotated[
        float,
        typer.Option(min=1.0, help="Measured in all, between the runs, without --profile."),
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="Same seed, same load.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the report here as JSON; beside it, a page.", callback=with_folder
        ),
    ] = None,
    **flags: Any,
) -> None:
    """The same load on the real engine and in the simulator. Exit status 1 if they differ."""
    console = Console(stderr=True)
    with refusals():
        if out is not None and out.suffix == ".md":
            raise InvalidRequest(
                "--out is the JSON file; the page gets its name with .md", param="out"
            )
        settings = resolve_model(settings_from(flags, os.environ, config))
        limits = Limits(duration_s=seconds)
        lengths = (parse_lengths(prompt_tokens), parse_lengths(output_tokens))
        workload = WorkloadOptions(Arrivals.POISSON, *lengths, limits, rate=rate, seed=seed)
        steps = Steps(tokens=step_tokens, rank=settings.learning.rank) if train else None
        options = FidelityOptions(workload, steps, runs, profile_seconds)
        real, simulated, profile = measure_both(settings, options, console)
    found = compare(real, simulated)
    shown = Console()
    shown.print(_table(FIGURES, figure_rows(found)))
    shown.print(_table(PARTS, part_rows(real, simulated)))
    if out is not None:
        machine = describe(profile.info.device, profile.threads)
        content = {"schema": SCHEMA, "machine": machine, "options": options, "comparisons": found}
        content |= {"real": real, "simulated": simulated, "profile": profile}
        encoded = msgspec.json.encode(msgspec.to_builtins(content, enc_hook=str))
        out.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
        load = _load(profile, options, measured=not settings.scheduling.profile)
        out.with_suffix(".md").write_text(as_markdown(machine, load, found, real, simulated))
    raise typer.Exit(0 if agree(found, real, simulated) else 1)


def measure_both(
    settings: Settings, options: FidelityOptions, console: Console
) -> tuple[list[Figures], list[Figures], Profile]:
    """Figures of all real and of all simulated runs, and the profile of the latter. The former
    begin with its first piece, all alike. Raises `InvalidRequest`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Rarely: the bar shares its cores with what is measured.
    with Progress(*columns, console=console, refresh_per_second=1) as progress:
        task = progress.add_task("loading", total=1.0)
        executor = build_executor(
            settings, lambda stage, done: progress.update(task, completed=done or 0.0)
        )
        named = settings.scheduling.profile
        profiler = None if named else Profiler(executor, settings)

        def measure_piece(profiler: Profiler) -> Profile:
            task = progress.add_task("profile", total=1.0)
            seconds = options.profile_seconds / (options.runs + 1)
            profiler.run(seconds, lambda done: progress.update(task, completed=done))
            return profiler.profile()

        profile = measure_piece(profiler) if profiler is not None else _read(named, executor)
        first = profile
        planned = build_workload(options.workload)
        arrivals, _ = arrivals_of(planned, Training(), executor.info.vocab_size, 0)
        end_s = max(arrivals[-1].at_s, 1e-9)
        _real(executor, settings, first, options, _first(arrivals))
        real, simulated = [], []
        for number in range(options.runs):
            task = progress.add_task(f"real {number + 1}", total=end_s)

            def show(now: float, task: Any = task) -> None:
                progress.update(task, completed=min(now, end_s))

            gc.collect()
            gc.freeze()  # what exists now stays: every run has as little to look through
            real.append(_real(executor, settings, first, options, arrivals, show))
            if profiler is not None:
                profile = measure_piece(profiler)
        for number in range(options.runs):
            task = progress.add_task(f"simulated {number + 1}", total=end_s)
            simulated.append(_simulated(settings, profile, options, arrivals, number))
            progress.update(task, completed=end_s)
    return real, simulated, profile


def _read(path: str, executor: Executor) -> Profile:
    """The profile that is named. Raises `InvalidRequest` if it is of something else."""
    profile = profile_for(path, executor.info)
    assert profile is not None  # a path was given
    return profile


def _first(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [each for each in arrivals if each.at_s <= arrivals[0].at_s + _WARM_UP_S]


def _real(
    executor: Executor,
    settings: Settings,
    profile: Profile,
    options: FidelityOptions,
    arrivals: Sequence[Arrival],
    on_progress: Any = lambda now: None,
) -> Figures:
    """One run on the device, with a new scheduler and an empty cache."""
    clock = SleepingClock()
    loop = join_loop(settings, executor, clock=clock, profile=profile)
    loop.runs_ahead = False  # predictions are of plans on an idle device
    seed = options.workload.seed
    return run_once(loop, clock, arrivals, profile.rates, options.steps, seed, on_progress)


def _simulated(
    settings: Settings,
    profile: Profile,
    options: FidelityOptions,
    arrivals: Sequence[Arrival],
    number: int,
) -> Figures:
    """One run in virtual time, with noise of its own."""
    clock, seed = VirtualClock(), options.workload.seed
    loop, _ = build_simulation(settings, profile, clock, seed=seed + number)
    return run_once(loop, clock, arrivals, profile.rates, options.steps, seed)


def _load(profile: Profile, options: FidelityOptions, *, measured: bool) -> str:
    """What both sides meet, in words; `measured`: the profile was, between the runs."""
    info, steps, planned = profile.info, options.steps, build_workload(options.workload)
    prompt = fmean([len(each.prompt) for each in planned])
    output = fmean([each.output_tokens for each in planned])
    beside = "nothing beside them"
    if steps is not None:
        beside = f"SFT steps of {steps.sequences} x {steps.tokens} tokens beside them all the time"
    when = " (before each real run and after the last)" if measured else ""
    errors = ", ".join(f"{kind} {each.mape:.1%}" for kind, each in profile.errors.items())
    return (
        f"{info.model}, {info.dtype}. {len(planned)} requests, {options.workload.rate:g} a second "
        f"(Poisson), with {prompt:.0f} prompt and {output:.0f} output tokens on average, {beside}; "
        f"{options.runs} runs of each side, medians. Profile{when}: {profile.source}; mean errors "
        f"held out: {errors}."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    return table
