"""`python -m benchmarks mace_real`: the runs that are not there yet, then figures and the page."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.learning.figures import draw
from benchmarks.learning.report import RunKey, as_json, report
from benchmarks.mace_real.load import POLICIES, Loads, Options
from benchmarks.mace_real.page import page
from benchmarks.mace_real.run import Kept, run, scoring_settings, server_of
from benchmarks.reporting.machine import describe, slug
from tandem.build import resolve_model

RESULTS = Path(__file__).parents[1] / "results"


def path_of(folder: Path, key: RunKey) -> Path:
    """Of a kept run."""
    return folder / f"{key.policy}-{key.retrain_rate:g}-{key.seed}.json"


def finished(folder: Path, keys: Sequence[RunKey]) -> dict[RunKey, Kept]:
    """The runs that are kept."""
    return {
        key: msgspec.json.decode(path_of(folder, key).read_bytes(), type=Kept)
        for key in keys
        if path_of(folder, key).exists()
    }


def make(options: Options, loads: Loads, folder: Path, port: int, until_s: float) -> None:
    """The missing runs, none of which begins after `until_s`."""
    for key in options.keys:
        if path_of(folder, key).exists():
            continue
        if time.monotonic() > until_s:
            return
        print(f"{key.policy}, retrain rate {key.retrain_rate:g}, seed {key.seed}", flush=True)
        versions = path_of(folder, key).with_suffix("")
        shutil.rmtree(versions, ignore_errors=True)
        versions.mkdir(parents=True)
        kept = run(server_of(key, options, port, versions), loads.load(key), loads.texts)
        aside = versions.with_suffix(".part")
        aside.write_bytes(msgspec.json.encode(kept))
        aside.replace(path_of(folder, key))
        shutil.rmtree(versions)


def main(
    model: Annotated[str, typer.Option(help="What is served.")] = "smollm2",
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    cache: Annotated[Path, typer.Option(help="Finished runs.")] = Path(".bench-cache"),
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    retrain_rate: Annotated[
        list[float] | None, typer.Option(help="Preferences per request; repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each policy at each rate.")] = 3,
    rate: Annotated[float, typer.Option(help="Requests/s, Poisson.")] = 0.3,
    pairs: Annotated[int, typer.Option(help="Preferences of a run at the highest rate.")] = 48,
    max_tokens: Annotated[int, typer.Option(help="Longer pairs are left out.")] = 192,
    minutes: Annotated[float, typer.Option(help="No run begins later; 0: any time.")] = 0.0,
    port: Annotated[int, typer.Option(help="Of the servers that are started.")] = 8033,
    out: Annotated[Path, typer.Option(help="Folder of page and figures.")] = RESULTS,
) -> None:
    """Serve, teach, score, compare."""
    if not (data / "preferences").is_dir():
        print(f"skipped: no shared data at {data}")
        return
    until_s = time.monotonic() + 60.0 * minutes if minutes else float("inf")
    options = Options(
        model,
        rate,
        pairs,
        max_tokens=max_tokens,
        retrain_rates=tuple(retrain_rate or Options(model).retrain_rates),
        seeds=tuple(range(1, seeds + 1)),
        policies=tuple(policy or POLICIES),
    )
    loads = Loads(options, resolve_model(scoring_settings(model)).model.model, data)
    folder = cache.resolve() / "mace-real" / loads.name()
    print(f"runs are kept in {folder}", flush=True)
    make(options, loads, folder, port, until_s)
    runs = finished(folder, options.keys)
    if not runs:
        print("no run is finished")
        return
    machine = describe("cpu", len(os.sched_getaffinity(0)))
    heading = (
        f"{', '.join(f'{name}: {value}' for name, value in machine.items())}\n\n{model}, {rate:g}"
        f" requests/s, {pairs} pairs a run at the highest rate, of up to {max_tokens} tokens."
    )
    found = report({key: kept.record for key, kept in runs.items()})
    stem = f"mace-real-{slug(machine)}"
    out.mkdir(parents=True, exist_ok=True)
    text = page(heading, found, runs, len(options.keys))
    (out / f"{stem}.md").write_text(text)
    (out / f"{stem}.json").write_bytes(as_json(msgspec.to_builtins(options), found))
    draw(found, out, stem)
    print(text)


if __name__ == "__main__":
    typer.run(main)
