"""Echo at the paper's scale, in simulation: see docs/benchmarks.md."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.echo import online
from benchmarks.echo.policies import chosen
from benchmarks.echo.pools import SOURCES, Limits
from benchmarks.echo.report import Setup
from benchmarks.echo.results import described, write
from benchmarks.echo.runs import Run, Work
from benchmarks.echo.simulated import DEVICE, NAME, Plan, find_rate, offline_of, profile, simulate
from tandem.core.slo import Slo

GAIN = 3.3
# What `--find-rate` found with the other defaults.
RATE = 9.75


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
    find_rate_: Annotated[
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
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
) -> None:
    """Simulate every policy over every data set; write echo-DEVICE.json, .md and figures."""
    if not (data / online.TRACE).is_file():
        raise SystemExit(f"skipped: no shared data at {data}")
    limits = Limits(document_tokens, answer_tokens, documents=documents)
    scheduling = (max_sequences, max_batch_tokens)
    slo = Slo(ttft_slo, tpot_slo)
    plan = Plan(data, 60.0 * minutes, slo, limits, *scheduling, attainment, peak_s=300.0)
    variants, info, tried = chosen(policy), profile().info, {}
    if find_rate_:
        rate, found = find_rate(plan)
        tried = {f"{each:.2f}": share for each, share in found.items()}
    load = online.load(data, rate, plan.seconds, 1.0, info.vocab_size)
    runs: list[Run] = []
    pools: dict[str, str] = {}
    for name in dataset or SOURCES:
        offline = offline_of(plan, name)
        pools[name] = described(name, offline)
        work = Work(name, load, offline, plan.seconds, slo)
        for label, variant in variants.items():
            began_s = time.perf_counter()
            run = simulate(plan, label, variant, work)
            runs.append(run)
            typer.echo(
                f"{name:14} {label:8} {run.tokens_s:8.0f} offline tokens/s, {run.hit_share:.0%}"
                f" hits, {run.attainment:.1%} attained; {time.perf_counter() - began_s:.0f} s"
            )
            setup = Setup(
                stem=f"echo-{DEVICE}",
                title="Echo's figures, simulated at the paper's scale",
                where=f"Simulated: {NAME} in bfloat16 on {DEVICE}, from its data sheet.",
                machine={"device": DEVICE, "model": NAME},
                rate=rate,
                tried=tried,
                objectives=(ttft_slo, tpot_slo),
                wanted=attainment,
                blocks=info.num_blocks,
                block_size=info.block_size,
                seconds=plan.seconds,
                rounds=1,
                pools=pools,
                gain=GAIN,
                settings={
                    "limits": asdict(limits),
                    "policies": {each: asdict(variant) for each, variant in variants.items()},
                    "max_sequences": max_sequences,
                    "max_batch_tokens": max_batch_tokens,
                },
            )
            page = write(setup, runs, out, draw=False)
    if figures:
        write(setup, runs, out, draw=True)
    typer.echo(page)


if __name__ == "__main__":
    typer.run(main)
