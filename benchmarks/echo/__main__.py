"""Echo at the paper's scale, in simulation: see docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.echo import online
from benchmarks.echo.policies import Variant, chosen
from benchmarks.echo.pools import SOURCES, Limits, encoder
from benchmarks.echo.report import Setup
from benchmarks.echo.results import brief, described, write
from benchmarks.echo.runs import Run, Work
from benchmarks.echo.simulated import DEVICE, NAME, Plan, find_rate, paper_profile, simulate
from tandem.core.slo import Slo

# Echo's figure 6: the best gain over BS.
GAIN = 3.3
# What `--find-rate` found with the other defaults.
RATE = 9.75
PEAK_S = 300.0


def run_one(
    plan: Plan, load: online.Load, variants: dict[str, Variant], each: tuple[str, str]
) -> tuple[Run, str]:
    """The run of a data set and a policy, and the pool in words."""
    dataset, policy = each
    offline = plan.pool(dataset, encoder(plan.data))
    work = Work(dataset, load, offline, plan.seconds, plan.slo)
    return simulate(plan, policy, variants[policy], work), described(dataset, offline)


def run_all(
    plan: Plan, load: online.Load, variants: dict[str, Variant], datasets: list[str], jobs: int
) -> Iterator[tuple[Run, str]]:
    """All runs in order, up to `jobs` at a time in processes of their own."""
    each, one = product(datasets, variants), partial(run_one, plan, load, variants)
    if jobs == 1:
        yield from map(one, each)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(one, each)


def main(
    policy: Annotated[
        list[str] | None,
        typer.Option(help="BS, BS+E, BS+E+S, Echo, or NAME:OPTION=VALUE,...; repeatable."),
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SOURCES)}; repeatable.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Simulated, of each run.")] = 26.0,
    rate: Annotated[float, typer.Option(help="Online requests/s, on average.")] = RATE,
    search: Annotated[
        bool, typer.Option("--find-rate", help="Search the rate first; takes minutes.")
    ] = False,
    ttft_slo: Annotated[float, typer.Option(help="Seconds.")] = 1.0,
    tpot_slo: Annotated[float, typer.Option(help="Seconds.")] = 0.05,
    attainment: Annotated[float, typer.Option(help="That online requests alone have.")] = 0.9,
    documents: Annotated[int, typer.Option(help="Of a pool; 0: as many as the data set.")] = 0,
    document_tokens: Annotated[int, typer.Option(help="Longer ones are cut.")] = 32_000,
    answer_tokens: Annotated[int, typer.Option(help="Longer answers are cut.")] = 128,
    max_sequences: Annotated[int, typer.Option(help="As of tandem serve.")] = 256,
    max_batch_tokens: Annotated[int, typer.Option(help="As of tandem serve.")] = 1024,
    figures: Annotated[bool, typer.Option(help="Draw figures 6 to 11.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; 2 GB of memory each.")] = 1,
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
) -> None:
    """Simulate every policy over every data set; write echo-DEVICE.json, .md and figures."""
    if not (data / online.TRACE).is_file():
        raise SystemExit(f"skipped: no shared data at {data}")
    limits = Limits(document_tokens, answer_tokens, documents=documents)
    scheduling, objectives = (max_sequences, max_batch_tokens), Slo(ttft_slo, tpot_slo)
    variants, profile = chosen(policy), paper_profile()
    plan = Plan(data, profile, 60.0 * minutes, objectives, limits, *scheduling, attainment, PEAK_S)
    tried: dict[float, float] = {}
    if search:
        rate, tried = find_rate(plan, first=8.0)
        typer.echo(f"{rate:.2f} requests/s")
    setup = Setup(
        stem=f"echo-{DEVICE}",
        title="Echo's figures, simulated at the paper's scale",
        where=f"Simulated: {NAME} in bfloat16 on {DEVICE}, from its data sheet.",
        machine={"device": DEVICE, "model": NAME},
        rate=rate,
        tried={f"{each:.2f}": share for each, share in tried.items()},
        objectives=(ttft_slo, tpot_slo),
        wanted=attainment,
        blocks=profile.info.num_blocks,
        block_size=profile.info.block_size,
        seconds=plan.seconds,
        rounds=1,
        gain=GAIN,
        settings={
            "limits": asdict(limits),
            "policies": {each: asdict(variant) for each, variant in variants.items()},
            "max_sequences": max_sequences,
            "max_batch_tokens": max_batch_tokens,
        },
    )
    load, runs = plan.load_at(rate), list[Run]()
    for run, said in run_all(plan, load, variants, dataset or list(SOURCES), jobs):
        runs.append(run)
        setup.pools[run.dataset] = said
        typer.echo(brief(run))
        write(setup, runs, out, draw=False)  # what there is, should the study be ended
    typer.echo(write(setup, runs, out, draw=figures))


if __name__ == "__main__":
    typer.run(main)
