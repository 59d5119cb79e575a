"""`python -m benchmarks structured`: schemas answered alone, together and preempted; what it costs.

Exit status 1 if a finished answer does not match its schema, a hostile grammar is not refused
within a second, or a mask takes 0.1 ms a row.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.live.server import ServerSpec, serving
from benchmarks.reporting.machine import describe, slug
from benchmarks.structured.answers import Writer, cut, different, wrong
from benchmarks.structured.hostile import hostile
from benchmarks.structured.schemas import schema_of

RESULTS = Path(__file__).parents[1] / "results"
LOG = Path(".bench-cache/structured.log")
# Of the KV cache in which the preempted answers are written.
TIGHT_BYTES = 64 << 20
MASK_ROWS = (1, 8, 32)
MOST_MASK_US = 100.0
MOST_REFUSAL_S = 1.0


def answered(model: str, schemas: int, fewer: int, max_tokens: int) -> dict[str, Any]:
    """All schemas together, `fewer` of them alone and preempted; and the cost of masks."""
    asked = [schema_of(number) for number in range(schemas)]
    writer = Writer(model)
    together = writer.answers(asked, max_tokens)
    alone = [writer.answers([schema], max_tokens)[0] for schema in asked[:fewer]]
    masks = [writer.mask_microseconds(asked, together, rows) for rows in MASK_ROWS]
    tight = Writer(model, kv_bytes=TIGHT_BYTES, policy="fcfs")
    preempted = tight.answers(asked[:fewer], max_tokens)
    return {
        "schemas": schemas,
        "cut": cut(together),
        "wrong": [said for pair in zip(asked, together, strict=True) if (said := wrong(*pair))],
        "alone": fewer,
        "other_alone": different(together[:fewer], alone),
        "preemptions": tight.preemptions,
        "other_preempted": different(together[:fewer], preempted),
        "masks": masks,
    }


def problems(found: dict[str, Any]) -> list[str]:
    """What is not as it must be."""
    said = [f"an answer does not match: {each}" for each in found["wrong"]]
    said += [
        f"masks of {each['rows']} rows take {each['mean']:.0f} us a row"
        for each in found["masks"]
        if each["mean"] >= MOST_MASK_US
    ]
    for name, row in found["hostile"]["rows"].items():
        if row["status"] != 400 or row["seconds"] > MOST_REFUSAL_S:
            said.append(f"{name}: {row['status']} after {row['seconds']:.2f} s")
    return said


def page(machine: dict[str, object], model: str, found: dict[str, Any]) -> str:
    """Markdown."""
    bad, fewer = found["hostile"], found["alone"]
    lines = [
        "# Structured output",
        "",
        ", ".join(f"{name}: {value}" for name, value in machine.items()),
        "",
        f"Model: {model}. {found['schemas']} schemas, greedy: {len(found['wrong'])} finished"
        f" answers do not match their schema, {found['cut']} were cut by their length. Of the first"
        f" {fewer}, {len(found['other_alone'])} have other tokens when written alone,"
        f" {len(found['other_preempted'])} when written with {found['preemptions']} preemptions.",
        "",
        "| rows of a batch | masks | mean (us a row) | median | p95 | p99 |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for each in found["masks"]:
        shares = " | ".join(f"{each[name]:.0f}" for name in ("mean", "median", "p95", "p99"))
        lines.append(f"| {each['rows']} | {each['masks']} | {shares} |")
    lines += [
        "",
        f"Longest pause of an ordinary stream: {bad['alone_s']:.3f} s alone, {bad['beside_s']:.3f}"
        " s beside these.",
        "",
        "| hostile | status | seconds | reason |",
        "|---|---:|---:|---|",
    ]
    for name, row in bad["rows"].items():
        reason = " ".join(row["message"].split()).replace("|", "\\|")
        lines.append(f"| {name} | {row['status']} | {row['seconds']:.3f} | {reason} |")
    return "\n".join(lines) + "\n"


def main(
    model: Annotated[str, typer.Option(help="What writes.")] = "smollm2",
    schemas: Annotated[int, typer.Option(help="Schemas of the generator.")] = 300,
    fewer: Annotated[int, typer.Option(help="Of them also alone and preempted.")] = 40,
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 192,
    port: Annotated[int, typer.Option(help="Of the server that is started.")] = 8035,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Write answers, time masks, send hostile grammars."""
    out.mkdir(parents=True, exist_ok=True)
    machine = describe("cpu", len(os.sched_getaffinity(0)))
    found = answered(model, schemas, fewer, max_tokens)
    with tempfile.TemporaryDirectory(prefix="structured-") as folder:
        spec = ServerSpec(model, port, Path(folder) / "store", LOG)
        with serving(spec):
            found["hostile"] = asyncio.run(hostile(spec.url, model))
    stem = out / f"structured-{slug(machine)}"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    text = page(machine, model, found)
    stem.with_suffix(".md").write_text(text)
    print(text)
    said = problems(found)
    print("\n".join(said))
    raise typer.Exit(1 if said else 0)


if __name__ == "__main__":
    typer.run(main)
