"""`python -m benchmarks page`: answers while the page is open, and once a grammar was used.

A round starts two servers, of which the second is asked for JSON once, and then puts the same fixed
closed load on them: nobody looks; the page's views are asked for; a browser shows them (if there is
one); the second server, whose grammars are not used. The order is drawn for each round. A ratio is
a round's figure over that of the round's first situation, with a bootstrap over rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Annotated

import httpx
import typer

from benchmarks.live.server import ServerSpec, serving
from benchmarks.page.watching import HAS_BROWSER, asked, shown, unwatched
from benchmarks.reporting.bootstrap import Interval, ratio
from benchmarks.reporting.machine import describe, slug
from tandem.bench.client import Target, first_model, run_load
from tandem.bench.http1 import Origin
from tandem.bench.measure import Outcome
from tandem.bench.workload import WORDS, PlannedRequest

RESULTS = Path(__file__).parents[1] / "results"
LOG = Path(".bench-cache/page.log")
WARM_REQUESTS = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}

Watching = Callable[[str], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Situation:
    """What goes on beside the load; `grammars`: on the server that was asked for JSON before."""

    name: str
    watching: Watching
    grammars: bool = False


PLAIN = Situation("plain", unwatched)
SITUATIONS = (
    PLAIN,
    Situation("page: its requests", asked),
    Situation("page: in a browser", shown),
    Situation("grammars loaded", unwatched, grammars=True),
)


@dataclass(frozen=True, slots=True)
class Load:
    """`clients` that each send `requests` one after the other."""

    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one situation in one round."""

    tokens_s: float
    tpot_ms: float


async def measure(spec: ServerSpec, load: Load, rng: Random) -> Figures:
    """Put the load on a server. Raises `RuntimeError` if an answer is not whole."""
    origin = Origin.parse(spec.url)
    target = Target(origin, await first_model(origin, None), text=True)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    answers = await asyncio.gather(
        *(_client(target, load, Random(rng.random())) for _ in range(load.clients))
    )
    took_s = loop.time() - begun_s
    outcomes = [outcome for own in answers for outcome in own]
    paces = [each.tpot_s for each in outcomes if each.tpot_s is not None]
    return Figures(sum(each.output_tokens for each in outcomes) / took_s, 1e3 * mean(paces))


async def _client(target: Target, load: Load, rng: Random) -> list[Outcome]:
    found = []
    for number in range(load.requests):
        prompt = tuple(rng.randrange(len(WORDS)) for _ in range(load.prompt_tokens))
        request = PlannedRequest(number, 0.0, prompt, load.output_tokens)
        [outcome] = await run_load([request], target, lambda outcome: None)
        if outcome.error is not None:
            raise RuntimeError(f"an answer failed: {outcome.error} {outcome.message}")
        found.append(outcome)
    return found


async def ask_for_json(spec: ServerSpec) -> None:
    """From here on the server has a compiled grammar. Raises `httpx.HTTPStatusError`."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    body = {
        "model": await first_model(Origin.parse(spec.url), None),
        "messages": [{"role": "user", "content": "Name a person."}],
        "max_tokens": 64,
        "response_format": schema,
    }
    async with httpx.AsyncClient(base_url=spec.url, timeout=120.0) as http:
        (await http.post("/v1/chat/completions", json=body)).raise_for_status()


async def play(
    specs: tuple[ServerSpec, ServerSpec], situations: Sequence[Situation], load: Load, rng: Random
) -> dict[str, Figures]:
    """One round on two running servers, the second of which gets a grammar."""
    await ask_for_json(specs[1])
    warm = Load(load.clients, WARM_REQUESTS, load.prompt_tokens, load.output_tokens)
    for spec in specs:
        await measure(spec, warm, rng)
    found = {}
    for situation in rng.sample(list(situations), len(situations)):
        spec = specs[situation.grammars]
        async with situation.watching(spec.url):
            found[situation.name] = await measure(spec, load, rng)
    return found


def ratios(rounds: Sequence[Mapping[str, Figures]], name: str) -> tuple[Interval, Interval]:
    """Tokens a second and time per token of a situation over those of the plain one."""
    throughput, pace = (
        ratio(
            {
                str(place): [(value(each[name]), value(each[PLAIN.name]))]
                for place, each in enumerate(rounds)
            }
        )
        for value in (lambda figures: figures.tokens_s, lambda figures: figures.tpot_ms)
    )
    return throughput, pace


def page(
    machine: Mapping[str, object],
    model: str,
    load: Load,
    rounds: Sequence[Mapping[str, Figures]],
) -> str:
    """Markdown."""
    lines = [
        "# Answers while the page is open, and once a grammar was used",
        "",
        ", ".join(f"{name}: {value}" for name, value in machine.items()),
        "",
        f"Model: {model}. {load.clients} clients at a time, each {load.requests} requests of"
        f" {load.prompt_tokens} words and {load.output_tokens} tokens; {len(rounds)} rounds with"
        " servers of their own. Ratios to the plain situation of the same round, with 95%"
        " intervals. A browser runs on the same cores as the server.",
        "",
        "| situation | tokens/s | ratio | ms per token | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in rounds[0]:
        throughput, pace = ratios(rounds, name)
        tokens_s = mean(each[name].tokens_s for each in rounds)
        tpot_ms = mean(each[name].tpot_ms for each in rounds)
        lines.append(
            f"| {name} | {tokens_s:.1f} | {_told(throughput)} | {tpot_ms:.2f} | {_told(pace)} |"
        )
    return "\n".join(lines) + "\n"


def _told(found: Interval) -> str:
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})"


def main(
    model: Annotated[str, typer.Option(help="What is served.")] = "smollm2",
    rounds: Annotated[int, typer.Option(help="With servers of their own.")] = 10,
    clients: Annotated[int, typer.Option(help="At the same time.")] = 4,
    requests: Annotated[int, typer.Option(help="Of each client in each situation.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Words of a prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 128,
    browser: Annotated[bool, typer.Option(help="Also show the page in Chromium.")] = HAS_BROWSER,
    port: Annotated[int, typer.Option(help="Of the first server; the second has the next.")] = 8036,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
    seed: Annotated[int, typer.Option(help="Of prompts and orders.")] = 0,
) -> None:
    """Measure, show, write."""
    out.mkdir(parents=True, exist_ok=True)
    machine = describe("cpu", len(os.sched_getaffinity(0)))
    load = Load(clients, requests, prompt_tokens, output_tokens)
    situations = [each for each in SITUATIONS if browser or each.watching is not shown]
    rng, found = Random(seed), []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="page-") as folder, ExitStack() as stack:
            first, second = (
                ServerSpec(model, port + place, Path(folder) / str(place), LOG) for place in (0, 1)
            )
            for spec in (first, second):
                stack.enter_context(serving(spec))
            played = asyncio.run(play((first, second), situations, load, rng))
        found.append({each.name: played[each.name] for each in situations})
        print(f"round {number + 1} of {rounds}", flush=True)
    stem = out / f"page-{slug(machine)}"
    told = [{name: asdict(figures) for name, figures in each.items()} for each in found]
    described = {"machine": machine, "model": model, "load": asdict(load), "rounds": told}
    stem.with_suffix(".json").write_text(json.dumps(described, indent=1) + "\n")
    text = page(machine, model, load, found)
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
