"""Serving and training together, beside co-located peers, in one run: see docs/benchmarks.md."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.coexecution.arrangement import Times, run
from benchmarks.coexecution.pair_source import make
from benchmarks.coexecution.report import Measured, as_data, as_markdown, from_json, to_json
from benchmarks.coexecution.systems import (
    AS_BEFORE,
    Setting,
    System,
    machine_cores,
    systems,
    warm_up,
    with_scheduling,
    worker_spec,
    workers_of,
)
from benchmarks.peers.comparison import CEILINGS, CEILINGS_ENGINE
from benchmarks.peers.driver import Workers, WorkerSpec
from benchmarks.peers.models import ensure_model, shape_of, streamed_bytes
from benchmarks.reporting.machine import describe, slug

# A window long enough for the second generation of requests: vLLM compiles at first sight.
WARM_UP = Times(seconds=0.1, settle_s=10.0, slice_s=1.0)


@dataclass(frozen=True)
class Plan:
    """What to measure. `alone` guards every window (e.g. takes a lock on the machine)."""

    model: str
    rounds: int
    times: Times
    cache: Path
    vllm_env: Path | None
    setting: Setting = AS_BEFORE
    say: Callable[[str], None] = print
    alone: Callable[[], AbstractContextManager[None]] = nullcontext


def measure(plan: Plan, chosen: list[System], measured: Measured, kept: Path) -> None:
    """Bring every system to `plan.rounds` rounds, saving what there is after each window."""
    if not chosen:
        return
    folder = ensure_model(plan.model, plan.cache)
    vocabulary, cores = shape_of(plan.model).vocab_size, machine_cores()
    options = {"device": "cpu", "threads": len(cores), "dtype": plan.setting.dtype}
    specs = [worker_spec(name, cores, plan.vllm_env, plan.setting) for name in workers_of(chosen)]
    ceilings = WorkerSpec(CEILINGS, CEILINGS_ENGINE, options=options)
    with Workers([ceilings, *specs], folder, plan.cache / "logs") as workers:
        for spec in specs:
            measured.workers[spec.name] = workers.by_name[spec.name].ready
            plan.say(f"{spec.name} loaded in {workers.by_name[spec.name].ready['load_s']:.0f} s")
        for system in warm_up(chosen):
            with plan.alone():
                run(system, workers.by_name, WARM_UP, vocabulary, seed=plan.rounds)
        for round_ in range(plan.rounds):
            turn = round_ % len(chosen)
            for system in chosen[turn:] + chosen[:turn]:
                samples = measured.samples.setdefault(system.key, [])
                if len(samples) > round_:
                    continue
                with plan.alone():
                    measured.ceilings.append(workers.by_name[CEILINGS].run({"repeats": 5}))
                    found = run(system, workers.by_name, plan.times, vocabulary, round_)
                samples.append(found)
                kept.write_text(json.dumps(to_json(measured)))
                rates = (found.output_tokens_per_s or 0.0, found.training_tokens_per_s or 0.0)
                plan.say(
                    f"round {round_ + 1}/{plan.rounds}  {system.key:16} {found.seconds:4.0f} s "
                    f"{rates[0]:6.1f} output, {rates[1]:6.1f} training tokens/s"
                )


def main(
    model: Annotated[
        str, typer.Option(help="qwen2.5-0.5b, llama-60m or a directory.")
    ] = "qwen2.5-0.5b",
    only: Annotated[
        list[str] | None, typer.Option(help="Rows, by key; default: all but peer-*-default.")
    ] = None,
    vllm_env: Annotated[
        Path | None, typer.Option(envvar="VLLM_ENV", help="Virtual environment of vLLM.")
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where models and logs go.")] = Path(".bench-cache"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
    rounds: Annotated[int, typer.Option(help="Rounds of all rows.")] = 3,
    seconds: Annotated[float, typer.Option(help="No step begins later in its window.")] = 14.0,
    tpot_slo: Annotated[
        float | None, typer.Option(help="TPOT objective of our requests, seconds.")
    ] = None,
    policy_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of our scheduling policy.")
    ] = None,
    slice_s: Annotated[float, typer.Option(help="Length of a time slice of (d).")] = 1.0,
    dtype: Annotated[str, typer.Option(help="Of all engines: bfloat16 or float32.")] = "bfloat16",
    data: Annotated[
        Path | None, typer.Option(help="Shared data: real pairs for DPO steps, eight a step.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longer real pairs are left out.")] = 256,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rounds of the last run.")
    ] = False,
) -> None:
    """Measure every row and write coexecution-DEVICE.json and .md."""
    # Workers are stopped processes: they must be ended by us, not left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = dict(each.split("=", 1) for each in policy_option or [])
    rows = with_scheduling(systems(machine_cores()), tpot_slo, options)
    chosen = choose(rows, only)
    cache = cache.resolve()
    setting = Setting(dtype, _pairs_of(model, data, max_tokens, cache) if data else "")
    plan = Plan(model, rounds, Times(seconds, 3.0, slice_s), cache, vllm_env, setting)
    report(plan, rows, chosen, out, resume=resume)


def report(
    plan: Plan, rows: list[System], chosen: list[System], out: Path, *, resume: bool
) -> None:
    """Measure and write the results."""
    pairs, dtype = plan.setting.pairs, plan.setting.dtype
    name = Path(plan.model).name + ("-pairs" if pairs else "")
    kept = plan.cache / f"coexecution-{name}.json"
    weights = streamed_bytes(plan.model) // 2
    measured = Measured(
        plan.model,
        weights * (4 if dtype == "float32" else 2),
        _peer(plan.vllm_env),
        dtype,
        "eight preference pairs (DPO)" if pairs else "random tokens",
    )
    if resume and kept.exists():
        measured = from_json(json.loads(kept.read_text()))
    plan.cache.mkdir(parents=True, exist_ok=True)
    for loss in ("sft", "dpo"):  # one after the other: all the workers at once need much memory
        measure(plan, [each for each in chosen if each.loss == loss], measured, kept)
    machine = describe("cpu", len(machine_cores()))
    data = as_data(machine, measured, [each for each in rows if each.key in measured.samples])
    page = as_markdown(data)
    out.mkdir(parents=True, exist_ok=True)
    suffix = f"-{name}" if pairs else ""
    stem = out / f"coexecution-{slug(machine)}{suffix}"
    Path(f"{stem}.json").write_text(json.dumps(data, indent=1) + "\n")
    Path(f"{stem}.md").write_text(page)
    plan.say(page)


def choose(rows: list[System], only: list[str] | None) -> list[System]:
    """The rows of these keys; an unknown one raises `typer.BadParameter`."""
    known = {each.key: each for each in rows}
    unknown = [key for key in only or [] if key not in known]
    if unknown:
        raise typer.BadParameter(f"no row {unknown[0]!r}; known: {', '.join(known)}")
    return [each for each in rows if (each.key in only if only else not each.optional)]


def _pairs_of(model: str, data: Path, max_tokens: int, cache: Path) -> str:
    """The file of real pairs for `model`, made anew. Ends the command where there is no data."""
    if not (data / "preferences").is_dir():
        print(f"skipped: no shared data at {data}")
        raise typer.Exit(0)
    path = cache / f"pairs-{Path(model).name}.json"
    make(ensure_model(model, cache), data, max_tokens, path)
    return str(path)


def _peer(vllm_env: Path | None) -> str:
    return "vLLM" if vllm_env else "transformers"


if __name__ == "__main__":
    typer.run(main)
