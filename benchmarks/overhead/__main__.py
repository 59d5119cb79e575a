"""What an iteration spends outside of the model: scheduling, batch building, the rest of the loop.

Runs decode iterations of many sequences on a random-weight model in this process. Timers sit around
the executor's two calls, `build_batch` and `run_batch`; what neither the scheduler nor they account
for is `other` (checks of the plan, results, adapter pins). Invariant: the parts add up to the step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import typer

from benchmarks.peers.models import configs, ensure_model
from benchmarks.reporting.machine import describe, slug
from tandem.build import build_loop
from tandem.config import resolve
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.engine.loop import EngineLoop
from tandem.executor.batch import build_batch
from tandem.executor.forward import run_batch

PARTS = ("schedule", "batch", "other", "model")


@dataclass
class Timers:
    """Seconds spent in wrapped calls since the last `take`."""

    spent_s: dict[str, float] = field(default_factory=dict)

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed under `name`."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.spent_s[name] = self.spent_s.get(name, 0.0) + time.perf_counter() - began

        return timed

    def take(self) -> dict[str, float]:
        """What was spent, and start again from nothing."""
        spent, self.spent_s = self.spent_s, {}
        return spent


def profile(loop: EngineLoop, sequences: int, steps: int, rng: Random) -> list[dict[str, float]]:
    """Seconds by part of `steps` iterations that decode `sequences` sequences."""
    vocabulary, timers = loop.info.vocab_size, Timers()
    sampling = SamplingParams(max_tokens=steps + 8, temperature=0.0, ignore_eos=True)
    for index in range(sequences):
        prompt = tuple(rng.choices(range(vocabulary), k=128))
        loop.add(Request(f"{rng.random()}-{index}", prompt, sampling))
    loop.runs_ahead = False  # each step has its own plan
    samples: list[dict[str, float]] = []
    with (
        patch("tandem.executor.executor.build_batch", timers.wrap("batch", build_batch)),
        patch("tandem.executor.executor.run_batch", timers.wrap("model", run_batch)),
    ):
        while loop.has_work:
            before = loop.stats()
            began = time.perf_counter()
            loop.step()
            step_s = time.perf_counter() - began
            after, spent = loop.stats(), timers.take()
            if after.iteration_tokens_sum - before.iteration_tokens_sum == sequences:
                schedule_s = after.schedule_s - before.schedule_s
                other_s = step_s - schedule_s - spent["batch"] - spent["model"]
                samples.append({"step": step_s, "schedule": schedule_s, "other": other_s, **spent})
    # The first steps still warm caches up; the last ones end requests.
    return samples[4:-4]


def report(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Medians in milliseconds, and each part's share of all time."""
    total = sum(sample["step"] for sample in samples)
    return {
        "steps": len(samples),
        "median_ms": {
            name: 1e3 * median(sample[name] for sample in samples) for name in ("step", *PARTS)
        },
        "share": {name: sum(sample[name] for sample in samples) / total for name in PARTS},
        "scheduler_and_batch_share": sum(s["schedule"] + s["batch"] for s in samples) / total,
    }


def as_markdown(data: dict[str, Any]) -> str:
    """A page with the table."""
    machine = ", ".join(f"{name}: {value}" for name, value in data["machine"].items())
    figures = data["figures"]
    lines = [
        "# What an iteration spends outside of the model",
        "",
        machine,
        "",
        f"{data['model']}, {data['sequences']} sequences decoding, {figures['steps']} iterations:"
        f" {figures['median_ms']['step']:.2f} ms each (median).",
        "",
        "| part | median ms | share of the iteration |",
        "|---|---|---|",
    ]
    names = {
        "schedule": "scheduler: decide, admit, apply results",
        "batch": "batch building",
        "other": "rest of the loop: plan checks, results",
        "model": "model and sampling",
    }
    for part in PARTS:
        lines.append(
            f"| {names[part]} | {figures['median_ms'][part]:.3f} | {figures['share'][part]:.2%} |"
        )
    share = figures["scheduler_and_batch_share"]
    return "\n".join([*lines, "", f"Scheduler and batch building together: {share:.2%}.", ""])


def main(
    model: Annotated[str, typer.Option(help="qwen2.5-0.5b or llama-60m.")] = "qwen2.5-0.5b",
    sequences: Annotated[int, typer.Option(help="Sequences that decode at once.")] = 32,
    steps: Annotated[int, typer.Option(help="Iterations.")] = 100,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    cache: Annotated[Path, typer.Option(help="Where the model goes.")] = Path(".bench-cache"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
) -> None:
    """Profile and write overhead-DEVICE.json and .md."""
    assert model in configs(), f"unknown model {model}"
    folder, threads = ensure_model(model, cache.resolve()), len(os.sched_getaffinity(0))
    settings = resolve(
        {
            "model": {"model": str(folder), "device": device, "dtype": "bfloat16"},
            "cache": {"memory_bytes": 1 << 30},
        }
    )
    samples = profile(build_loop(settings), sequences, steps, Random(0))
    machine = describe(device, threads)
    data = {
        "machine": machine,
        "model": model,
        "sequences": sequences,
        "figures": report(samples),
    }
    page = as_markdown(data)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"overhead-{slug(machine)}"
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    stem.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    typer.run(main)
