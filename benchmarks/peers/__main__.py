"""Speed beside transformers and vLLM, measured in one run: see docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.peers.comparison import Comparison, Plan, compare
from benchmarks.peers.driver import ALLOCATOR, WorkerSpec, vllm_environ
from benchmarks.peers.report import as_data, as_markdown
from benchmarks.reporting.machine import describe, slug

OURS = "tandem"
# transformers as it comes, and with the allocator settings that our engine gives its own process.
TUNED = "transformers, tuned malloc"
KV_GIB = 1


def main(
    models: Annotated[
        list[str] | None, typer.Option("--model", help="qwen2.5-0.5b, llama-60m; default: both.")
    ] = None,
    engines: Annotated[
        list[str] | None, typer.Option("--engine", help="Default: all that are there.")
    ] = None,
    vllm_env: Annotated[
        Path | None, typer.Option(envvar="VLLM_ENV", help="Virtual environment of vLLM.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where models and logs go.")] = Path(".bench-cache"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Rounds of all jobs; medians are reported.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="The first model, two rounds.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
) -> None:
    """Measure every engine on every model and write peers-DEVICE.json and .md."""
    # Workers are stopped processes: they must be ended by us, not left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threads = len(os.sched_getaffinity(0))
    wanted = engines or [OURS, "transformers", TUNED, *(["vllm"] if vllm_env else [])]
    specs = [_spec(name, device, threads, vllm_env) for name in wanted]
    names = models or ["qwen2.5-0.5b", "llama-60m"]
    plan = Plan(specs, 2 if quick else rounds, cache.resolve(), seed)
    comparisons: list[Comparison] = [
        compare(name, plan) for name in (names[:1] if quick else names)
    ]
    machine = describe(device, threads)
    data = as_data(machine, comparisons, OURS)
    page = as_markdown(data, OURS)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"peers-{slug(machine)}"
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    stem.with_suffix(".md").write_text(page)
    print(page)


def _spec(name: str, device: str, threads: int, vllm_env: Path | None) -> WorkerSpec:
    options: dict[str, Any] = {"device": device, "threads": threads}
    if name != "vllm":
        environ = {} if name == "transformers" else ALLOCATOR
        engine = "transformers" if name == TUNED else name
        return WorkerSpec(
            name, f"benchmarks.peers.engine_{engine}", options=options, environ=environ
        )
    if vllm_env is None:
        raise typer.BadParameter("vllm is measured in its own environment; say --vllm-env DIR")
    environ = ALLOCATOR | vllm_environ(vllm_env, range(threads), KV_GIB)
    return WorkerSpec(
        name, "benchmarks.peers.engine_vllm", str(vllm_env / "bin" / "python"), options, environ
    )


if __name__ == "__main__":
    typer.run(main)
