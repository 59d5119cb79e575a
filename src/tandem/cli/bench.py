"""`tandem bench`: load a server and report what its clients saw.

Turns flags into options; the work is in `tandem.bench`. Exit status: 0 if at least one request was
answered (`serve`) or all was clean (`soak`), 1 if not, 2 for flags that cannot be.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.bench.client import Endpoint, Target, first_model, run_load
from tandem.bench.http1 import Origin
from tandem.bench.lengths import FORMS, parse_lengths
from tandem.bench.measure import Outcome, summarise
from tandem.bench.options import Arrivals, WorkloadOptions, build_workload
from tandem.bench.report import as_json, as_table
from tandem.bench.soak import SoakOptions, as_lines, soak
from tandem.bench.workload import Limits, PlannedRequest, Shape, warmup
from tandem.cli.output import refusals, with_folder
from tandem.core.slo import Slo

app = typer.Typer(help="Measure servers and the simulator.", no_args_is_help=True)

Url = Annotated[str, typer.Option(help="The server, e.g. 127.0.0.1:8000.", envvar="TANDEM_URL")]
Model = Annotated[str, typer.Option(help="Model id; default: the first that the server lists.")]
Key = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="API key, if needed.")]
Seed = Annotated[int, typer.Option(help="Same seed and flags, same workload.")]
Out = Annotated[
    Path | None, typer.Option(help="Write the report here as JSON.", callback=with_folder)
]
TRACE = "Azure CSV, Mooncake JSONL, vidur or answer lengths (.gz too): lengths, prefixes, times."
USAGE = "Ask for token counts (stream_options.include_usage); without: events are counted."


@app.command()
def serve(
    url: Url = "http://127.0.0.1:8000",
    model: Model = "",
    endpoint: Annotated[Endpoint, typer.Option(help="What is loaded.")] = Endpoint.COMPLETIONS,
    arrivals: Annotated[Arrivals, typer.Option(help="Arrival process.")] = Arrivals.POISSON,
    rate: Annotated[float | None, typer.Option(help="Requests/s; stretches a trace.")] = None,
    time_scale: Annotated[float, typer.Option(help="Stretch a trace's times by this.")] = 1.0,
    trace: Annotated[Path | None, typer.Option(help=TRACE)] = None,
    prompt_tokens: Annotated[str, typer.Option(help=f"Prompt lengths: {FORMS}.")] = "128",
    output_tokens: Annotated[str, typer.Option(help=f"Output lengths: {FORMS}.")] = "64",
    length_scale: Annotated[float, typer.Option(help="Scale a trace's lengths.")] = 1.0,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Clip a trace's prompts.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Clip a trace's outputs.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Stop after so many.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of arrivals.")] = None,
    warmup_requests: Annotated[
        int, typer.Option("--warmup", help="Requests before, not measured.")
    ] = 1,
    ttft_slo: Annotated[float | None, typer.Option(help="Seconds; for goodput.")] = None,
    tpot_slo: Annotated[float | None, typer.Option(help="Seconds; for goodput.")] = None,
    text: Annotated[
        bool,
        typer.Option(
            "--text", help="Words instead of token ids, of which some have no text and so no event."
        ),
    ] = False,
    vocab_size: Annotated[int, typer.Option(help="Prompt ids are drawn below this.")] = 1000,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Send ignore_eos; some servers refuse it.")
    ] = True,
    usage: Annotated[bool, typer.Option(help=USAGE)] = True,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take.")] = 600.0,
    api_key: Key = None,
    seed: Seed = 0,
    out: Out = None,
    details: Annotated[bool, typer.Option(help="Every request in the JSON too.")] = False,
) -> None:
    """Open-loop load: requests leave at their time however slow the server is."""
    given = {name: value for name, value in locals().items() if name != "api_key"}
    with refusals():
        workload = WorkloadOptions(
            arrivals=arrivals,
            prompts=parse_lengths(prompt_tokens),
            outputs=parse_lengths(output_tokens),
            limits=Limits(
                max_requests, duration, max_prompt_tokens, max_output_tokens, length_scale
            ),
            rate=rate,
            time_scale=time_scale,
            trace=trace,
            vocabulary=vocab_size,
            seed=seed,
        )
        origin = Origin.parse(url)
        planned = build_workload(workload)
        target = Target(
            origin=origin,
            model=model or asyncio.run(first_model(origin, api_key)),
            endpoint=endpoint,
            api_key=api_key,
            text=text,
            ignore_eos=ignore_eos,
            usage=usage,
            temperature=temperature,
            timeout_s=timeout,
        )
    first = Shape(len(planned[0].prompt), planned[0].output_tokens)
    _load(warmup(warmup_requests, first, vocab_size, seed), target, "warm-up")
    outcomes = _load(planned, target, "load")
    summary = summarise(outcomes, _slo(ttft_slo, tpot_slo))
    console = Console()
    console.print(as_table(summary))
    for kind, message in {each.error: each.message for each in outcomes if each.error}.items():
        console.print(f"{kind}: {message}", markup=False)
    if out is not None:
        out.write_bytes(as_json(given, summary, outcomes if details else None))
    raise typer.Exit(0 if summary.completed else 1)


@app.command("soak")
def soak_command(
    url: Url = "http://127.0.0.1:8000",
    model: Model = "",
    clients: Annotated[int, typer.Option(help="Concurrent streaming clients.")] = 64,
    seconds: Annotated[float, typer.Option(help="How long they ask.")] = 60.0,
    disconnects: Annotated[float, typer.Option(help="Share of requests dropped early.")] = 0.2,
    pid: Annotated[
        list[int] | None, typer.Option(help="Server process whose memory is watched.")
    ] = None,
    api_key: Key = None,
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """Many clients that come and go; then the server must hold nothing. Tandem servers only."""
    with refusals():
        origin = Origin.parse(url)
        options = SoakOptions(
            origin=origin,
            model=model or asyncio.run(first_model(origin, api_key)),
            clients=clients,
            seconds=seconds,
            seed=seed,
            disconnect_share=disconnects,
            api_key=api_key,
            pids=tuple(pid or ()),
        )
    report = asyncio.run(soak(options))
    print("\n".join(as_lines(report)))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    raise typer.Exit(0 if report.clean else 1)


def _load(requests: list[PlannedRequest], target: Target, title: str) -> list[Outcome]:
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Standard error, and rarely: the bar shares its core with the load generator.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task(title, total=len(requests))
        return asyncio.run(run_load(requests, target, lambda _: progress.advance(task)))


def _slo(ttft_s: float | None, tpot_s: float | None) -> Slo | None:
    if ttft_s is None and tpot_s is None:
        return None
    unbounded = float("inf")
    return Slo(unbounded if ttft_s is None else ttft_s, unbounded if tpot_s is None else tpot_s)
