"""Speed beside transformers, vLLM and llama.cpp, measured in one run: see docs/benchmarks.md."""

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
LLAMA = {"llama.cpp bf16": "bf16", "llama.cpp q8_0": "q8_0"}
KV_GIB = 1


def main(
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="qwen2.5-0.5b, llama-60m, smollm2; default: all."),
    ] = None,
    engines: Annotated[
        list[str] | None, typer.Option("--engine", help="Default: all that are there.")
    ] = None,
    vllm_env: Annotated[
        Path | None, typer.Option(envvar="VLLM_ENV", help="Virtual environment of vLLM.")
    ] = None,
    llama_env: Annotated[
        Path | None,
        typer.Option(envvar="LLAMA_ENV", help="Virtual environment with llama-cpp-python."),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where models and logs go.")] = Path(".bench-cache"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Of the arithmetic; float32 on CPUs that are slow with 16 bits.")
    ] = "bfloat16",
    rounds: Annotated[int, typer.Option(help="Rounds of all jobs; medians are reported.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="The first model, two rounds.")] = False,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
) -> None:
    """Measure every engine on every model and write peers-DEVICE.json and .md."""
    # Workers are stopped processes: they must be ended by us, not left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    threads = len(os.sched_getaffinity(0))
    environments = {"vllm": vllm_env, **dict.fromkeys(LLAMA, llama_env)}
    there = [name for name, folder in environments.items() if folder]
    options: dict[str, Any] = {"device": device, "threads": threads, "dtype": dtype}
    specs = [
        _spec(name, options, environments)
        for name in engines or [OURS, "transformers", TUNED, *there]
    ]
    names = models or ["qwen2.5-0.5b", "llama-60m", "smollm2"]
    plan = Plan(specs, 2 if quick else rounds, cache.resolve(), seed)
    comparisons: list[Comparison] = [
        compare(name, plan) for name in (names[:1] if quick else names)
    ]
    machine = describe(device, threads) | {"arithmetic": dtype}
    data = as_data(machine, comparisons, OURS)
    page = as_markdown(data, OURS)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"peers-{slug(machine)}"
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    stem.with_suffix(".md").write_text(page)
    print(page)


def _spec(name: str, options: dict[str, Any], environments: dict[str, Path | None]) -> WorkerSpec:
    if name not in environments:
        environ = {} if name == "transformers" else ALLOCATOR
        engine = "transformers" if name == TUNED else name
        return WorkerSpec(
            name, f"benchmarks.peers.engine_{engine}", options=options, environ=environ
        )
    folder = environments[name]
    if folder is None:
        flag = "--vllm-env" if name == "vllm" else "--llama-env"
        raise typer.BadParameter(f"{name} is measured in its own environment; say {flag} DIR")
    python = str(folder / "bin" / "python")
    if name in LLAMA:
        own = options | {"gguf": LLAMA[name]}
        return WorkerSpec(name, "benchmarks.peers.engine_llama", python, own, ALLOCATOR)
    environ = ALLOCATOR | vllm_environ(folder, range(options["threads"]), KV_GIB)
    return WorkerSpec(name, "benchmarks.peers.engine_vllm", python, options, environ)


if __name__ == "__main__":
    typer.run(main)
