"""`python -m benchmarks mace_real`: the runs that are not there yet, then figures and the page."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from benchmarks.reporting.machine import describe, short
from tandem.build import resolve_model

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Made:
    """How runs are made: the file of their rows, the name of all that shapes them
    (`Loads.name`), and the machine."""

    path: Path
    name: str
    machine: str


def finished(path: Path, name: str, keys: Sequence[RunKey]) -> dict[str, dict[RunKey, Kept]]:
    """The runs that have a row made as `name` says: by machine, in the order of `keys`."""
    kept: dict[str, dict[RunKey, Kept]] = {}
    for row in rows.read(path):
        if row["made"] == name:
            key = RunKey(row["retrain_rate"], row["policy"], row["seed"])
            kept.setdefault(row["machine"], {})[key] = of_row(row)
    return {
        machine: {key: runs[key] for key in keys if key in runs} for machine, runs in kept.items()
    }


def even(
    kept: Mapping[str, Mapping[RunKey, Kept]], policies: Sequence[str]
) -> dict[str, dict[RunKey, Kept]]:
    """By machine, the runs of the rates and seeds that it made with all `policies`: the same pairs
    for each. What two machines made counts once."""
    counted: set[RunKey] = set()
    found: dict[str, dict[RunKey, Kept]] = {}
    for machine, runs in kept.items():
        ours = {
            key: each
            for key, each in runs.items()
            if key not in counted
            and all(RunKey(key.retrain_rate, policy, key.seed) in runs for policy in policies)
        }
        counted.update(ours)
        if ours:
            found[machine] = ours
    return found


def merged(
    parts: Mapping[str, Mapping[RunKey, Kept]], keys: Sequence[RunKey]
) -> dict[RunKey, Kept]:
    """The runs of all machines, in the order of `keys`."""
    runs = {key: each for part in parts.values() for key, each in part.items()}
    return {key: runs[key] for key in keys if key in runs}


def make(options: Options, loads: Loads, made: Made, port: int, until_s: float) -> None:
    """The runs that are missing on this machine, but for rates and seeds that another one made with
    all policies. None begins after `until_s`. One that fails has no row and is made again by the
    next command. Raises `RuntimeError` if the code has changed meanwhile, which each server reads
    anew."""
    kept, began = finished(made.path, made.name, options.keys), code()
    done = {*kept.get(made.machine, ()), *merged(even(kept, options.policies), options.keys)}
    for key in options.keys:
        if key in done:
            continue
        if time.monotonic() > until_s:
            return
        load = loads.load(key)
        with tempfile.TemporaryDirectory(prefix="mace-real-") as folder:
            server = server_of(key, options, port, Path(folder))
            try:
                found = (
                    base_run(options.model, load)
                    if key.policy == BASE
                    else run(server, load, loads.texts, options.settings)
                )
            except (Refused, RuntimeError, httpx.HTTPError) as error:
                print(f"{key} failed and has no row: {error!r}", flush=True)
                found = None
        if code() != began:
            raise RuntimeError("the code has changed: run the study in a checkout that stays")
        if found is None:
            continue
        row = {"made": made.name, "machine": made.machine, **asdict(key), **as_row(found)}
        rows.append(made.path, row)
        answered = ", ".join(f"{each.number} from {each.at_s:.0f} s" for each in found.moments)
        print(f"{key} versions: {answered or 'none'}; refused {len(found.refused)}", flush=True)


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
    machine = short(describe("cpu", len(os.sched_getaffinity(0))))
    path = out / "mace-real.jsonl"
    made = Made(path, loads.name(), machine)
    make(options, loads, made, port, until_s)
    parts = even(finished(path, made.name, options.keys), options.policies)
    runs = merged(parts, options.keys)
    if not runs:
        print("no seed is finished by all policies")
        return
    learning = ", ".join(f"{name} {value}" for name, value in options.settings.items())
    counted = Counter(pair.source for pair in loads.texts.values())
    sets = ", ".join(f"{source} {count}" for source, count in counted.most_common())
    heading = (
        f"{'; '.join(f'{len(part)} runs on {where}' for where, part in parts.items())}.\n\n"
        f"{model}, {rate:g} requests/s,"
        f" {pairs} pairs a run at the highest rate, of up to {max_tokens} tokens"
        f" ({len(loads.texts)} pairs: {sets}); of"
        f" the adapter's settings, {learning}, else the server's; TPOT objective"
        f" {options.tpot_slo_s:g} s. `{BASE}` is scored and not served: it learns nothing."
    )
    found = report({key: kept.record for key, kept in runs.items()})
    text = page(heading, found, runs, len(options.keys))
    path.with_suffix(".md").write_text(text)
    path.with_suffix(".json").write_bytes(as_json(msgspec.to_builtins(options), found))
    draw(found, out, path.stem)
    print(text)


if __name__ == "__main__":
    typer.run(main)
