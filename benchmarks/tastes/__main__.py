"""`python -m benchmarks tastes`: every taste by every kind of feedback, on one server."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer

from benchmarks.live import rows
from benchmarks.live.api import Api, Refused
from benchmarks.live.code import learning_code
from benchmarks.live.server import ServerSpec, serving
from benchmarks.live.watch import Patience
from benchmarks.reporting.machine import describe, slug
from benchmarks.tastes.own import FOLDER, own_answers, path_of
from benchmarks.tastes.report import page
from benchmarks.tastes.session import KINDS, Session
from benchmarks.tastes.tastes import TASTES, Taste, lessons

RESULTS = Path(__file__).parents[1] / "results"
LOG = Path(".bench-cache/tastes.log")
TRICKLED = 120
TRICKLE_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: `every_s` above 0 sends the lessons one by one."""

    model: str
    tastes: Sequence[Taste]
    kinds: Sequence[str]
    count: int
    every_s: float
    patience: Patience
    again: bool
    own: Path


async def study(url: str, plan: Plan, path: Path) -> None:
    """Make the runs that have no row yet; a row is written as each ends."""
    code = learning_code("tastes")
    made = {"model": plan.model, "lessons": plan.count, "code": code}
    done = {
        (row["taste"], row["kind"])
        for row in ([] if plan.again else rows.read(path))
        if made.items() <= row.items()
    }
    wanted = [(t, kind) for t in plan.tastes for kind in plan.kinds if (t.name, kind) not in done]
    if not wanted:
        return
    other = next(taste for taste in TASTES if taste.name == "friend")
    async with Api(url) as api:
        questions = [
            question
            for taste in (*{t.name: t for t, _ in wanted}.values(), other)
            for question in (*taste.taught[: 2 * plan.count], *taste.apart)
        ]
        own = await own_answers(api, questions, path_of(api.model, plan.own))
        own_lessons = {taste.name: lessons(taste, own, plan.count) for taste, _ in wanted}
        session = Session(api, plan.patience)
        version = await session.begin(lessons(other, own, 16))
        if not version:
            raise RuntimeError("the other adapter has learned nothing: it would answer as the base")
        print(f"another adapter answers with version {version}", flush=True)
        for taste, kind in wanted:
            try:
                row = await session.run(taste, kind, own_lessons[taste.name], plan.every_s)
            except (Refused, httpx.HTTPError) as error:
                print(f"{taste.name} {kind} failed and has no row: {error!r}", flush=True)
                continue
            rows.append(path, {**row, "code": code, "every_s": plan.every_s})
            print(
                f"{taste.name:8} {kind:14} shown {row['shown']:.2f} degenerate"
                f" {row['degenerate']:.2f} kept {row['kept']} changed {row['changed_s']}"
                f" learned {row['learned_s']:.0f} s {row['samples']}",
                flush=True,
            )


def main(
    model: Annotated[str, typer.Option(help="What is served.")] = "smollm2",
    taste: Annotated[list[str] | None, typer.Option(help="Tastes (all; repeatable).")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Of feedback (all; repeatable).")] = None,
    count: Annotated[int, typer.Option(help="Examples of each; 0: 40, trickling 120.")] = 0,
    trickle: Annotated[bool, typer.Option("--trickle", help="One example at a time.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two that trickle.")] = 5.0,
    again: Annotated[bool, typer.Option("--again", help="Also what has a row already.")] = False,
    port: Annotated[int, typer.Option(help="Of the server that is started.")] = 8031,
    store: Annotated[Path | None, typer.Option(help="Its directory; default: a new one.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of rows and page.")] = RESULTS,
    own: Annotated[Path, typer.Option(help="Folder of the model's own answers.")] = FOLDER,
    quiet: Annotated[
        float, typer.Option(help="Learning ended if no sample was taken so long.")
    ] = 120.0,
    limit: Annotated[float, typer.Option(help="Most seconds of a run.")] = 900.0,
) -> None:
    """Teach, ask, judge; rows and page are written to --out and gone on with."""
    known = {each.name: each for each in TASTES}
    chosen = taste or (["pirate"] if trickle else list(known))
    kinds = kind or (["preferences"] if trickle else list(KINDS))
    for given, all_of_them in ((chosen, known), (kinds, KINDS)):
        if unknown := [name for name in given if name not in all_of_them]:
            raise typer.BadParameter(f"no {unknown[0]!r}; known: {', '.join(all_of_them)}")
    plan = Plan(
        model,
        [known[name] for name in chosen],
        kinds,
        count or (TRICKLED if trickle else 40),
        every if trickle else 0.0,
        Patience(quiet, TRICKLE_LIMIT_S if trickle else limit),
        again,
        own,
    )
    out.mkdir(parents=True, exist_ok=True)
    machine = describe("cpu", len(os.sched_getaffinity(0)))
    stem = out / f"tastes-{slug(machine)}"
    paths = stem.with_suffix(".jsonl"), Path(f"{stem}-trickle.jsonl")
    with tempfile.TemporaryDirectory(prefix="tastes-") as folder:
        directory = store or Path(folder) / "store"
        spec = ServerSpec(model, port, directory, LOG)
        with serving(spec):
            asyncio.run(study(spec.url, plan, paths[trickle]))
    text = page(machine, *map(rows.read, paths))
    stem.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
