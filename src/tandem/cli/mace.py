"""`tandem bench mace`: the paper's figures at its own scale, in simulation; tables and plots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.bench.mace import (
    RETRAIN_RATES,
    SCALES,
    VARIANTS,
    Figures,
    Scale,
    Variant,
    as_markdown,
    at_rate,
    run_variant,
)
from tandem.bench.mace_figures import draw_mace
from tandem.build import build_simulation
from tandem.cli.simulate import load_profile
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.errors import TandemError
from tandem.engine.loop import EngineLoop
from tandem.estimators.profile import Profile
from tandem.sim.timeline import Timeline

SCHEMA = "tandem-mace-1"
# Loads of the sweep, as factors of a scale's own; at this retrain rate.
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
SWEEP_RATE = 0.2


def mace_command(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
    scale: Annotated[
        list[str] | None, typer.Option(help="server, edge; repeatable; default: both.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Of arrivals; default: the scale's.")
    ] = None,
    figures: Annotated[bool, typer.Option(help="Draw them; needs matplotlib.")] = True,
    seed: Annotated[int, typer.Option(help="Same seed, same figures.")] = 0,
) -> None:
    """MACE's figures 5 and 9 to 13 at the paper's scale, in simulation."""
    console = Console(stderr=True)
    chosen = [each for each in SCALES if scale is None or each.name in scale]
    if not chosen:
        known = ", ".join(each.name for each in SCALES)
        raise typer.BadParameter(f"there is no such scale; known: {known}", param_hint="--scale")
    try:
        pages: list[str] = []
        content: dict[str, object] = {"schema": SCHEMA, "seed": seed}
        for each in chosen:
            timed = each if seconds is None else replace(each, duration_s=seconds)
            rows, sweep = _measure(timed, seed, console)
            profile = load_profile(timed.profile)
            pages.append(as_markdown(timed, profile, rows))
            content[timed.name] = {"rates": rows, "loads": sweep}
            if figures:
                draw_mace(timed, rows, sweep, out)
        out.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.encode(msgspec.to_builtins(content))
        (out / "mace.json").write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
        page = "\n".join(["# MACE at the paper's scale, simulated", "", *pages])
        (out / "mace.md").write_text(page)
        typer.echo(page)
    except TandemError as error:
        console.print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None


def _measure(scale: Scale, seed: int, console: Console) -> tuple[list[Figures], list[Figures]]:
    """Every variant at every retrain rate, and at every load."""
    profile = load_profile(scale.profile)
    runs = [(variant, scale, rate) for rate in RETRAIN_RATES for variant in VARIANTS]
    loads = [
        (v, at_rate(scale, factor * scale.rate), SWEEP_RATE) for factor in LOADS for v in VARIANTS
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    found: list[Figures] = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(scale.name, total=len(runs) + len(loads))
        for variant, load, rate in (*runs, *loads):
            progress.update(
                task, description=f"{load.name} {load.rate:g}/s {rate:.0%} {variant.name}"
            )
            found.append(run_variant(variant, load, profile, rate, make_loop, seed))
            progress.advance(task)
    return found[: len(runs)], found[len(runs) :]


def make_loop(
    variant: Variant, profile: Profile, clock: VirtualClock, timeline: Timeline
) -> EngineLoop:
    """The simulated engine of a variant."""
    settings = resolve(
        {
            "scheduling": {
                "policy": variant.policy,
                "policy_options": dict(variant.options),
                "max_sequences": 256,
                "max_batch_tokens": 2048,
                "tpot_slo": 0.1,
            },
            "cache": {"prefix_caching": variant.prefix_caching},
        }
    )
    loop, _ = build_simulation(settings, profile, clock, on_plan=timeline)
    return loop
