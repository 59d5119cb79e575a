"""MACE's figures, simulated at the paper's scale and measured at a small one.

    python -m benchmarks mace --engine demo

Writes tables, JSON and plots; what is run, and on which engines, is told elsewhere.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.mace.claims import Results, claims
from benchmarks.mace.engines import engines_over, load_engine, make_engine
from benchmarks.mace.figures import draw_mace
from benchmarks.mace.measured import SMALL, WINDOWS, Measured, bearable, measure_capacity
from benchmarks.mace.overhead import measure_overhead
from benchmarks.mace.report import as_page
from benchmarks.mace.runs import RETRAIN_RATES, SCALES, VARIANTS, MakeEngine, Scale, run_variant
from benchmarks.mace.sweep import PARTS, Run, Sweep, grouped, over_rounds
from tandem.bench.machine import Watch, describe
from tandem.config import Settings
from tandem.core.errors import InvalidRequest
from tandem.core.ports import Executor
from tandem.estimators.datasheet import load_profile
from tandem.estimators.profile import Profile
from tandem.profiler import measure as measure_profile

SCHEMA = "tandem-mace-2"
# Loads of the sweep, as factors of a scale's own.
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
# Fewer of both where time cannot be simulated.
SMALL_RETRAIN_RATES = (0.0, 0.1, 0.3, 0.5)
SMALL_LOADS = (0.5, 1.0, 1.5)
# The machine is measured for as long as arrivals of so many runs take, but no longer than that.
_PROFILE_RUNS, _MOST_PROFILE_S = 5, 30.0


def main(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
    scale: Annotated[
        list[str] | None,
        typer.Option(help="server, edge, with --engine cpu; repeatable; default: all."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Run this model too, on the CPU: demo, a directory or a name."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of all runs of --engine.")] = 2,
    seconds: Annotated[
        float | None, typer.Option(min=0.01, help="Of arrivals; default: the scale's.")
    ] = None,
    figures: Annotated[bool, typer.Option(help="Draw them; needs matplotlib.")] = True,
    seed: Annotated[int, typer.Option(help="Same seed, same loads.")] = 0,
) -> None:
    """MACE's figures 5 and 10 to 13 and table 1: simulated, and measured with --engine."""
    console = Console(stderr=True)
    known = [*SCALES, SMALL] if engine is not None else [*SCALES]
    chosen = [each for each in known if scale is None or each.name in scale]
    if not chosen:
        names = ", ".join(each.name for each in known)
        raise typer.BadParameter(f"there is no such scale; known: {names}", param_hint="--scale")
    if engine is not None and SMALL not in chosen:
        hint = f"nothing is measured without --scale {SMALL.name}"
        raise typer.BadParameter(hint, param_hint="--engine")
    found: list[Results] = []
    try:
        for each in chosen:
            timed = each if seconds is None else replace(each, duration_s=seconds)
            if each is SMALL and engine is not None:
                results = measured(engine, timed, rounds, seed, console)
            else:
                results = simulated(timed, seed, console)
            found.append(results)
            if figures:
                draw_mace(results, out)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error
    out.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"schema": SCHEMA, "seed": seed}
    content |= {results.scale.name: _content(results) for results in found}
    encoded = msgspec.json.encode(msgspec.to_builtins(content))
    (out / "mace.json").write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    page = as_page(found)
    (out / "mace.md").write_text(page)
    typer.echo(page)


def simulated(scale: Scale, seed: int, console: Console) -> Results:
    """At the paper's scale, by the data sheet of its device."""
    sweep = Sweep(scale, load_profile(scale.profile), RETRAIN_RATES, LOADS, RETRAIN_RATES, seed)
    return measure(sweep, make_engine, console)


def measured(model: str, scale: Scale, rounds: int, seed: int, console: Console) -> Results:
    """With `model` on this machine, under a load that it was found to bear."""
    executor, settings, profile = _load(model, scale, console)
    gc.collect()
    gc.freeze()  # what exists now stays for good
    watch, capacity = Watch(), measure_capacity(scale, profile, engines_over(executor))
    scale = bearable(replace(scale, profile=settings.model.served_name), capacity)
    rates, window_s = SMALL_RETRAIN_RATES, scale.duration_s / WINDOWS
    fifo_rates = [rate for rate in rates if rate > 0.0]
    sweep = Sweep(scale, profile, rates, SMALL_LOADS, fifo_rates, seed, rounds=rounds, timings=1)
    results = measure(sweep, engines_over(executor, window_s), console)
    machine = describe("cpu", executor.info.threads)
    how = Measured(machine, capacity, window_s, rounds, watch.others())
    return replace(results, measured=how)


def measure(sweep: Sweep, make: MakeEngine, console: Console) -> Results:
    """All runs of a sweep, and what scheduling costs."""
    runs = sweep.runs()
    timed = [Run("overhead", variant, sweep.usual) for variant in VARIANTS]
    done, overheads = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # Rarely: the bar shares its cores with what is measured.
    with Progress(*columns, TimeElapsedColumn(), console=console, refresh_per_second=1) as progress:
        task = progress.add_task(sweep.scale.name, total=len(runs) + len(timed))

        def each(of: Sequence[Run]) -> Iterator[Run]:
            for run in of:
                load = run.load
                what = f"{run.part}: {load.scale.rate:g}/s {load.retrain_rate:.0%}"
                told = f"{sweep.scale.name}, {what} {run.variant.name}"
                progress.update(task, description=told)
                yield run
                progress.advance(task)

        for run in each(runs):
            done.append((run, run_variant(run.variant, run.load, make)))
        for run in each(timed):
            overheads.append(measure_overhead(run.variant, run.load, make, runs=sweep.timings))
    rounds = {part: grouped(done, part) for part in PARTS}
    rows = {part: [over_rounds(group) for group in groups] for part, groups in rounds.items()}
    parts = (rows["rates"], rows["loads"], rows["fifo"], overheads)
    return Results(sweep.scale, sweep.profile, *parts, runs=rounds)


def _load(model: str, scale: Scale, console: Console) -> tuple[Executor, Settings, Profile]:
    """The model, and what its work takes on this machine."""
    seconds = min(_MOST_PROFILE_S, _PROFILE_RUNS * scale.duration_s)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, refresh_per_second=1) as progress:
        loading = progress.add_task("loading", total=1.0)
        executor, settings = load_engine(
            model, lambda stage, done: progress.update(loading, completed=done)
        )
        task = progress.add_task("profile", total=1.0)
        profile = measure_profile(
            executor, settings, seconds, lambda done: progress.update(task, completed=done)
        )
    return executor, settings, profile


def _content(results: Results) -> dict[str, Any]:
    """Of a scale, for the JSON file."""
    content: dict[str, Any] = {
        "rates": results.rates,
        "loads": results.loads,
        "fifo": results.fifo,
        "overheads": results.overheads,
        "claims": claims(results),
    }
    if results.measured is not None:
        content |= {
            "scale": results.scale,
            "ceilings": results.profile.ceilings,
            "measured": results.measured,
            "rounds": results.runs,
        }
    return content


if __name__ == "__main__":
    typer.run(main)
