"""`python -m benchmarks mace_real`: the runs that are not there yet, then figures and the page."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
import typer

from benchmarks.learning.figures import draw
from benchmarks.learning.report import RunKey, as_json, report
from benchmarks.live import rows
from benchmarks.live.api import Refused
from benchmarks.mace_real.load import POLICIES, Loads, Options, code
from benchmarks.mace_real.page import BASE, page
from benchmarks.mace_real.run import (
    Kept,
    as_row,
    base_run,
    of_row,
    run,
    scoring_settings,
    server_of,
)
from benchmarks.reporting.machine import describe, slug
from tandem.build import resolve_model

RESULTS = Path(__file__).parents[1] / "results"


def finished(path: Path, name: str, keys: Sequence[RunKey]) -> dict[RunKey, Kept]:
    """The runs that have a row made as `name` says, in the order of `keys`."""
    kept = {
        RunKey(row["retrain_rate"], row["policy"], row["seed"]): of_row(row)
        for row in rows.read(path)
        if row["made"] == name
    }
    return {key: kept[key] for key in keys if key in kept}


def even(runs: Mapping[RunKey, Kept], policies: Sequence[str]) -> dict[RunKey, Kept]:
    """The runs of the rates and seeds that all `policies` have: the same pairs for each."""
    return {
        key: kept
        for key, kept in runs.items()
        if all(RunKey(key.retrain_rate, policy, key.seed) in runs for policy in policies)
    }


def make(options: Options, loads: Loads, name: str, path: Path, port: int, until_s: float) -> None:
    """The runs that are missing under this name, none of which begins after `until_s`. One that
    fails has no row and is made again by the next command. Raises `RuntimeError` if the code has
    changed meanwhile, which each server reads anew."""
    done, began = finished(path, name, options.keys), code()
    for key in options.keys:
        if key in done:
            continue
        if time.monotonic() > until_s:
            return
        load = loads.load(key)
        with tempfile.TemporaryDirectory(prefix="mace-real-") as folder:
            server = server_of(key, options, port, Path(folder))
            try:
                kept = (
                    base_run(options.model, load)
                    if key.policy == BASE
                    else run(server, load, loads.texts, options.settings)
                )
            except (Refused, RuntimeError, httpx.HTTPError) as error:
                print(f"{key} failed and has no row: {error!r}", flush=True)
                kept = None
        if code() != began:
            raise RuntimeError("the code has changed: run the study in a checkout that stays")
        if kept is None:
            continue
        rows.append(path, {"made": name, **asdict(key), **as_row(kept)})
        answered = ", ".join(f"{each.number} from {each.at_s:.0f} s" for each in kept.moments)
        print(f"{key} versions: {answered or 'none'}; refused {len(kept.refused)}", flush=True)


def main(
    model: Annotated[str, typer.Option(help="What is served.")] = "smollm2",
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    retrain_rate: Annotated[
        list[float] | None, typer.Option(help="Preferences per request; repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each policy at each rate.")] = 3,
    rate: Annotated[float, typer.Option(help="Requests/s, Poisson.")] = 0.8,
    pairs: Annotated[int, typer.Option(help="Preferences of a run at the highest rate.")] = 96,
    max_tokens: Annotated[int, typer.Option(help="Longer pairs are left out.")] = 96,
    minutes: Annotated[float, typer.Option(help="No run begins later; 0: any time.")] = 0.0,
    port: Annotated[int, typer.Option(help="Of the servers that are started.")] = 8033,
    out: Annotated[Path, typer.Option(help="Folder of rows, page and figures.")] = RESULTS,
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
    machine = describe("cpu", len(os.sched_getaffinity(0)))
    stem = f"mace-real-{slug(machine)}"
    path = out / f"{stem}.jsonl"
    name = loads.name()
    make(options, loads, name, path, port, until_s)
    runs = even(finished(path, name, options.keys), options.policies)
    if not runs:
        print("no seed is finished by all policies")
        return
    learning = ", ".join(f"{name} {value}" for name, value in options.settings.items())
    counted = Counter(pair.source for pair in loads.texts.values())
    sets = ", ".join(f"{source} {count}" for source, count in counted.most_common())
    heading = (
        f"{', '.join(f'{name}: {value}' for name, value in machine.items())}\n\n{model}, {rate:g}"
        f" requests/s, {pairs} pairs a run at the highest rate, of up to {max_tokens} tokens"
        f" ({len(loads.texts)} pairs: {sets}); of"
        f" the adapter's settings, {learning}, else the server's; TPOT objective"
        f" {options.tpot_slo_s:g} s. `{BASE}` is scored and not served: it learns nothing."
    )
    found = report({key: kept.record for key, kept in runs.items()})
    text = page(heading, found, runs, len(options.keys))
    (out / f"{stem}.md").write_text(text)
    (out / f"{stem}.json").write_bytes(as_json(msgspec.to_builtins(options), found))
    draw(found, out, stem)
    print(text)


if __name__ == "__main__":
    typer.run(main)
