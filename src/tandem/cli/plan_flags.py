"""The flags of `tandem plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandem.cli.output import refusals, with_folder
from tandem.config import resolve

SCHEMA = "tandem-plan-1"
_PROFILES = "As of `tandem simulate`; repeatable: one plan for each device; default: an A100."
_BATCH = "JSONL of OpenAI's batch API that is repeated; default: requests of fixed lengths."


def plan_command(
    trace: Annotated[Path, typer.Option(help="Recorded requests, as of `tandem simulate`.")],
    profile: Annotated[list[str] | None, typer.Option(help=_PROFILES)] = None,
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token.")] = 1.0,
    tpot_slo: Annotated[float, typer.Option(help="Seconds a token after that.")] = 0.1,
    attainment: Annotated[
        float, typer.Option(help="Share of requests inside both.", min=0.0, max=1.0)
    ] = 0.9,
    peak: Annotated[float, typer.Option(help="Busiest seconds that decide.", min=1.0)] = 300.0,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of the trace; default: all of it.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests/s; stretches the trace.")] = None,
    batch: Annotated[Path | None, typer.Option(help=_BATCH)] = None,
    offline_prompt_tokens: Annotated[int, typer.Option(help="Without --batch.", min=1)] = 1024,
    offline_output_tokens: Annotated[int, typer.Option(help="Without --batch.", min=1)] = 128,
    policy: Annotated[str, typer.Option(help="As of `tandem serve`.")] = "unified",
    max_replicas: Annotated[int, typer.Option(help="More are not tried.", min=1)] = 64,
    figures: Annotated[bool, typer.Option(help="Draw attainment over replicas.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="JSON of the plans.", callback=with_folder)
    ] = None,
) -> None:
    """Say how many devices a recorded load needs, and what they leave over (Echo, 5.4)."""
    import msgspec

    from tandem.bench.capacity import plan_capacity
    from tandem.bench.lengths import parse_lengths
    from tandem.bench.options import Arrivals, WorkloadOptions, build_workload
    from tandem.bench.workload import Limits
    from tandem.cli.plan import Replica, draw, table_of
    from tandem.estimators.datasheet import load_profile

    console = Console(stderr=True)
    with refusals():
        devices = profile or ["a100-40g:llama-3-8b"]
        scheduling = {"policy": policy, "ttft_slo": ttft_slo, "tpot_slo": tpot_slo}
        settings = resolve({"scheduling": scheduling}, environ={})
        plans = []
        for device in devices:
            lengths = parse_lengths("1")  # the trace has them
            workload = WorkloadOptions(
                Arrivals.TRACE,
                lengths,
                lengths,
                Limits(duration_s=duration),
                rate=rate,
                trace=trace,
                vocabulary=load_profile(device).info.vocab_size,
            )
            one = Replica(
                device, settings, batch, offline_prompt_tokens, offline_output_tokens, console
            )
            planned = build_workload(workload)
            plans.append(
                plan_capacity(
                    device, planned, one, peak_s=peak, attainment=attainment, most=max_replicas
                )
            )
        Console().print(table_of(plans))
        if out is not None:
            content = {"schema": SCHEMA, "plans": msgspec.to_builtins(plans)}
            out.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
            console.print(f"written: {out}")
        if figures:
            for picture in draw(plans, attainment, out or Path("plan.json")):
                console.print(f"written: {picture}")
