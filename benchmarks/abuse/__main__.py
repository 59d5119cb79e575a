"""`python -m benchmarks abuse`: what strangers cost those who ask ordinary questions.

Exit status 1 if an ordinary request takes twice its time (median or 95th percentile), or fails, or
if the API's process has more than a gigabyte.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import httpx
import psutil
import typer

from benchmarks.live.server import ServerSpec, serving
from benchmarks.reporting.machine import describe, slug

RESULTS = Path(__file__).parents[1] / "results"
LOG = Path(".bench-cache/abuse.log")
EVERY_S = 1.0
LOOK_S = 0.2
MOST_BYTES = 1_000_000_000
MOST_TIMES = 2.0
QUESTION = [{"role": "user", "content": "Name three rivers."}]


@dataclass(slots=True)
class Phase:
    """Seconds of ordinary requests by kind, what failed, and the most memory that was seen."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    rss_bytes: int = 0

    def add(self, other: Phase) -> None:
        """Count another phase of the same kind in."""
        for kind, found in other.seconds.items():
            self.seconds.setdefault(kind, []).extend(found)
        self.failed += other.failed
        self.rss_bytes = max(self.rss_bytes, other.rss_bytes)

    def summary(self, kind: str) -> dict[str, float]:
        """Milliseconds."""
        found = self.seconds[kind]
        high = quantiles(found, n=20)[-1] if len(found) > 1 else found[0]
        return {"requests": len(found), "median": 1e3 * median(found), "p95": 1e3 * high}


async def ordinary(spec: ServerSpec, pid: int, seconds: float) -> Phase:
    """A chat and a look at the health every second, and the memory of the API's process."""
    phase, end_s, process = Phase(), time.monotonic() + seconds, psutil.Process(pid)
    async with httpx.AsyncClient(base_url=spec.url, timeout=60.0) as http:

        async def chat() -> httpx.Response:
            body = {"model": spec.model, "messages": QUESTION, "max_tokens": 16, "temperature": 0}
            return await http.post("/v1/chat/completions", json=body)

        async def health() -> httpx.Response:
            return await http.get("/health")

        async def repeat(kind: str) -> None:
            once = chat if kind == "chat" else health
            while time.monotonic() < end_s:
                begun_s = time.monotonic()
                try:
                    answer = await once()
                    if answer.status_code != 200:
                        phase.failed[f"{kind} {answer.status_code}"] += 1
                except httpx.HTTPError as error:
                    phase.failed[f"{kind} {type(error).__name__}"] += 1
                took_s = time.monotonic() - begun_s
                phase.seconds.setdefault(kind, []).append(took_s)
                await asyncio.sleep(max(0.0, EVERY_S - took_s))

        async def look() -> None:
            while time.monotonic() < end_s:
                phase.rss_bytes = max(phase.rss_bytes, process.memory_info().rss)
                await asyncio.sleep(LOOK_S)

        await asyncio.gather(repeat("chat"), repeat("health"), look())
    return phase


async def study(spec: ServerSpec, pid: int, minutes: float) -> dict[str, Any]:
    """Alone before and after, the strangers between."""
    alone = await ordinary(spec, pid, 60.0)
    seconds = 60.0 * minutes
    said = ["-m", "benchmarks.abuse.strangers", spec.url, spec.model, f"{seconds:g}"]
    strangers = await asyncio.create_subprocess_exec(sys.executable, *said, stdout=PIPE)
    beside = await ordinary(spec, pid, seconds)
    answered, _ = await strangers.communicate()
    alone.add(await ordinary(spec, pid, 60.0))
    return {
        "minutes": minutes,
        "alone": {kind: alone.summary(kind) for kind in alone.seconds},
        "beside": {kind: beside.summary(kind) for kind in beside.seconds},
        "failed": {"alone": dict(alone.failed), "beside": dict(beside.failed)},
        "api_bytes": beside.rss_bytes,
        "strangers": json.loads(answered),
    }


def problems(found: dict[str, Any]) -> list[str]:
    """What is worse than it may be; empty if nothing is."""
    said = [f"{kind} failed {n} times" for kind, n in found["failed"]["beside"].items()]
    for kind, beside in found["beside"].items():
        alone = found["alone"][kind]
        said += [
            f"{name} of {kind} is {beside[name] / alone[name]:.1f} times as long"
            for name in ("median", "p95")
            if beside[name] > MOST_TIMES * alone[name]
        ]
    if found["api_bytes"] > MOST_BYTES:
        said.append(f"the API's process had {found['api_bytes'] / 1e9:.2f} GB")
    return said


def page(machine: dict[str, object], model: str, found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "# Ordinary requests beside strangers",
        "",
        ", ".join(f"{name}: {value}" for name, value in machine.items()),
        "",
        f"Model: {model}. {found['minutes']:g} minutes of strangers; alone is the minute before and"
        f" the one after. The API's process had at most {found['api_bytes'] / 1e9:.2f} GB. Failed"
        f" beside them: {found['failed']['beside'] or 'none'}.",
        "",
        "| request | alone: median, p95 (ms) | beside: median, p95 (ms) | times |",
        "|---|---:|---:|---:|",
    ]
    for kind, beside in found["beside"].items():
        alone = found["alone"][kind]
        lines.append(
            f"| {kind} | {alone['median']:.1f}, {alone['p95']:.1f} | {beside['median']:.1f},"
            f" {beside['p95']:.1f} | {beside['median'] / alone['median']:.2f},"
            f" {beside['p95'] / alone['p95']:.2f} |"
        )
    lines += ["", "| stranger | answered (status: how often) |", "|---|---|"]
    for name, answered in sorted(found["strangers"].items()):
        said = ", ".join(f"{status}: {count}" for status, count in sorted(answered.items()))
        lines.append(f"| {name} | {said} |")
    return "\n".join(lines) + "\n"


def main(
    model: Annotated[str, typer.Option(help="What is served.")] = "demo",
    minutes: Annotated[float, typer.Option(help="Of strangers.")] = 10.0,
    port: Annotated[int, typer.Option(help="Of the server that is started.")] = 8034,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Ask alone, ask beside strangers, compare."""
    out.mkdir(parents=True, exist_ok=True)
    machine = describe("cpu", len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="abuse-") as folder:
        spec = ServerSpec(model, port, Path(folder) / "store", LOG)
        with serving(spec) as pid:
            found = asyncio.run(study(spec, pid, minutes))
    stem = out / f"abuse-{slug(machine)}"
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    text = page(machine, model, found)
    stem.with_suffix(".md").write_text(text)
    print(text)
    said = problems(found)
    print("\n".join(said))
    raise typer.Exit(1 if said else 0)


if __name__ == "__main__":
    typer.run(main)
