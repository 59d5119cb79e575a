"""`tandem bench mace`: the paper's figures at its own scale, in simulation; tables and plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.bench.mace import (
    FIFO_VARIANTS,
    RETRAIN_RATES,
    SCALES,
    VARIANTS,
    Engine,
    Load,
    Scale,
    Variant,
    at_rate,
    run_variant,
)
from tandem.bench.mace_claims import Results, claims
from tandem.bench.mace_figures import draw_mace
from tandem.bench.mace_overhead import measure_overhead
from tandem.bench.mace_report import LEARNING_NOTE, as_markdown
from tandem.build import build_simulation
from tandem.cli.simulate import load_profile
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.errors import TandemError
from tandem.engine.loop import EngineLoop
from tandem.estimators.profile import Profile
from tandem.sim.timeline import Timeline

SCHEMA = "tandem-mace-2"
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
    """MACE's figures 5 and 10 to 13 and table 1 at the paper's scale, in simulation."""
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
            results = measure(timed, seed, console)
            pages.append(as_markdown(results))
            content[timed.name] = {
                "rates": results.rates,
                "loads": results.loads,
                "fifo": results.fifo,
                "overheads": results.overheads,
                "claims": claims(results),
            }
            if figures:
                draw_mace(results, out)
        out.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.encode(msgspec.to_builtins(content))
        (out / "mace.json").write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
        page = "\n".join(["# MACE at the paper's scale, simulated", "", LEARNING_NOTE, "", *pages])
        (out / "mace.md").write_text(page)
        typer.echo(page)
    except TandemError as error:
        console.print(f"error: {error}", markup=False)
        raise typer.Exit(2) from None


def measure(scale: Scale, seed: int, console: Console) -> Results:
    """Every variant at every retrain rate and at every load, in order of arrival, and its cost."""
    profile = load_profile(scale.profile)
    own = [Load(scale, profile, rate, seed) for rate in RETRAIN_RATES]
    loads = [
        Load(at_rate(scale, factor * scale.rate), profile, SWEEP_RATE, seed) for factor in LOADS
    ]
    usual = Load(scale, profile, SWEEP_RATE, seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:

        def each(
            of: Sequence[Load], variants: Sequence[Variant], what: str
        ) -> Iterator[tuple[Variant, Load]]:
            """All of them under each of the loads, with a bar."""
            task = progress.add_task(what, total=len(of) * len(variants))
            for load, variant in product(of, variants):
                progress.update(
                    task,
                    description=f"{scale.name}, {what}: {load.scale.rate:g}/s "
                    f"{load.retrain_rate:.0%} {variant.name}",
                )
                yield variant, load
                progress.advance(task)

        return Results(
            scale,
            profile,
            [run_variant(*run, make_engine) for run in each(own, VARIANTS, "rates")],
            [run_variant(*run, make_engine) for run in each(loads, VARIANTS, "loads")],
            [run_variant(*run, make_engine) for run in each(own, FIFO_VARIANTS, "fifo")],
            [measure_overhead(*run, make_engine) for run in each([usual], VARIANTS, "overhead")],
        )


def make_engine(variant: Variant, profile: Profile) -> Engine:
    """A simulated engine of a variant, with a clock of its own."""
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    return Engine(make_loop(variant, profile, clock, timeline), clock, timeline)


def make_loop(
    variant: Variant, profile: Profile, clock: VirtualClock, timeline: Timeline
) -> EngineLoop:
    """The simulated engine of a variant."""
    settings = resolve(
        {
            "scheduling": {
                "policy": variant.policy,
                "policy_options": dict(variant.options),
                "max_sequences": variant.max_sequences,
                "max_batch_tokens": 2048,
                "tpot_slo": 0.1,
            },
            "cache": {"prefix_caching": variant.prefix_caching},
        }
    )
    loop, _ = build_simulation(settings, profile, clock, on_plan=timeline)
    return loop
