"""`python -m benchmarks poison`: runs of bad feedback, several adapters at a time, one server."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.live import rows
from benchmarks.live.api import Api, Refused
from benchmarks.live.code import learning_code
from benchmarks.live.server import ServerSpec, serving
from benchmarks.live.watch import Patience
from benchmarks.poison.report import degenerate, newest, page
from benchmarks.poison.runs import KEYS, Poisoner, Sizes, planned, tried
from benchmarks.reporting.machine import describe, short
from tandem.model.names import served_name

RESULTS = Path(__file__).parents[1] / "results"
LOG = Path(".bench-cache/poison.log")
SOON = ["version_wait_s=5"]  # so that the last few samples of a run wait for 50 s, not for 600
NAMES = ["administrator", *(f"user-{number}" for number in range(1, KEYS + 1))]


@dataclass(frozen=True, slots=True)
class Plan:
    """Which runs there are, and how long they may be begun; `at_once` adapters at a time."""

    runs: range
    seed: int
    at_once: int
    until_s: float
    sizes: Sizes
    patience: Patience


def key_file() -> str:
    """Keys of an administrator and of users who teach any adapter."""
    entries = []
    for place, name in enumerate(NAMES):
        rights = "admin = true" if place == 0 else "admin = false"
        entries.append(f'[[keys]]\nkey = "{name}"\nname = "{name}"\ntrain = ["*"]\n{rights}\n')
    return "\n".join(entries)


async def study(url: str, plan: Plan, path: Path, machine: str) -> None:
    """Make the runs of this model that have no row yet, on any machine, until the time is up."""
    async with Api(url, NAMES) as api:
        made = {
            "model": api.model,
            "seed": plan.seed,
            "settings": plan.sizes.settings,
            "most": plan.sizes.most,
            "code": learning_code("poison"),
        }
        done = {row["run"] for row in rows.read(path) if made.items() <= row.items()}
        waiting = iter([number for number in plan.runs if number not in done])
        base = await Poisoner.neutral(api, None, plan.sizes)
        poisoner = Poisoner(api, base, plan.sizes, plan.patience)

        async def one_after_the_other() -> None:
            for number in waiting:
                if time.monotonic() > plan.until_s:
                    return
                try:
                    row = await poisoner.run(planned(number, plan.seed, plan.sizes))
                except (Refused, httpx.HTTPError) as error:
                    print(f"run {number} failed and has no row: {error!r}", flush=True)
                    continue
                if not tried(row):
                    print(f"run {number} waited only and has no row: fewer --at-once", flush=True)
                    continue
                rows.append(path, row | made | {"machine": machine})
                print(
                    f"run {number} {row['garbage']:14} {row['feedback']:14} {row['count']:3}"
                    f" {row['seconds']:5.0f} s published {len(row['published'])} refused"
                    f" {len(row['refused'])} degenerate {degenerate([row])} {row['samples']}",
                    flush=True,
                )

        async with asyncio.TaskGroup() as group:
            for _ in range(plan.at_once):
                group.create_task(one_after_the_other())


def settings_of(given: list[str]) -> dict[str, Any]:
    """NAME=VALUE of adapters' settings, values as in JSON, or words."""
    found: dict[str, Any] = {}
    for each in given:
        name, _, value = each.partition("=")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def main(
    model: Annotated[str, typer.Option(help="What is served.")] = "smollm2",
    runs: Annotated[int, typer.Option(help="In all; those with a row are not made again.")] = 200,
    first: Annotated[int, typer.Option(help="The first run that this command makes.")] = 0,
    seed: Annotated[int, typer.Option(help="Of everything that is random.")] = 0,
    minutes: Annotated[float, typer.Option(help="No run begins later; 0: any time.")] = 0.0,
    at_once: Annotated[int, typer.Option(help="Adapters at the same time.")] = 2,
    least: Annotated[int, typer.Option(help="Feedbacks of a run.")] = 50,
    most: Annotated[int, typer.Option(help="Feedbacks of a run.")] = 300,
    setting: Annotated[
        list[str] | None, typer.Option(help="Of the adapters, NAME=VALUE; else the server's.")
    ] = None,
    port: Annotated[int, typer.Option(help="Of the server that is started.")] = 8032,
    store: Annotated[Path | None, typer.Option(help="Its directory; default: a new one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of rows and page.")] = RESULTS,
    quiet: Annotated[
        float, typer.Option(help="Learning ended if no sample was taken so long.")
    ] = 120.0,
    limit: Annotated[float, typer.Option(help="Most seconds of a run.")] = 600.0,
) -> None:
    """Poison, look, count; exit status 1 if a published version is degenerate, 3 if runs are
    missing."""
    until_s = time.monotonic() + 60.0 * minutes if minutes else float("inf")
    sizes = Sizes(least, most, settings=settings_of(SOON if setting is None else setting))
    plan = Plan(range(first, runs), seed, at_once, until_s, sizes, Patience(quiet, limit))
    machine = short(describe("cpu", len(os.sched_getaffinity(0))))
    out.mkdir(parents=True, exist_ok=True)
    path = out / "poison.jsonl"
    with tempfile.TemporaryDirectory(prefix="poison-") as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(key_file())
        directory = store or Path(folder) / "store"
        flags = ("--api-key-file", str(keys))
        spec = ServerSpec(model, port, directory, LOG, flags)
        with serving(spec):
            asyncio.run(study(spec.url, plan, path, machine))
    found = rows.read(path)
    name = served_name(model)
    text = page(found, {name: runs})
    path.with_suffix(".md").write_text(text)
    print(text)
    ours = newest(found, name)
    raise typer.Exit(1 if degenerate(ours) else 3 if len(ours) < runs else 0)


if __name__ == "__main__":
    typer.run(main)
