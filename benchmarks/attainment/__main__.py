"""SLO attainment and training throughput by policy under recorded load: see docs/benchmarks.md."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.attainment.engine import profiled, settings_of
from benchmarks.attainment.figures import (
    BASELINE,
    OURS,
    Measurement,
    Unloaded,
    capacity,
    measurement,
    unloaded,
)
from benchmarks.attainment.report import Setup, as_data, as_markdown
from benchmarks.attainment.workload import Job, Workload
from benchmarks.peers.driver import Worker, Workers, WorkerSpec, in_new_process
from benchmarks.peers.models import configs, ensure_model
from benchmarks.reporting.machine import describe, slug
from tandem.bench.machine import busy_cpu_s
from tandem.bench.traces import read_trace
from tandem.core.slo import Slo
from tandem.estimators.profile import write_profile
from tandem.model.load import computes_in

# Name -> options. Ekya's interval is that of `python -m benchmarks mace`.
POLICIES: dict[str, dict[str, str]] = {
    "no_retrain": {},
    "unified": {},
    "adainf": {},
    "ekya": {"interval_s": "10"},
    "mace": {},
    "static": {},
    "fcfs": {},
}
LOADS = (0.3, 0.6, 0.9)
TRACE = "azure_llm_2023_conv.csv.gz"
ENGINE = "benchmarks.attainment.engine"
# About what the last requests of a window take to end.
DRAIN_S = 6.0
LEAST_S = 3.0
# Requests at once while capacity is measured; output tokens of a request that is measured alone.
AT_ONCE = 32
ALONE_TOKENS = 16


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    model: str
    device: str
    dtype: str
    policies: dict[str, dict[str, str]]
    loads: list[float]
    rounds: int
    rival_rounds: int
    seconds: float
    capacity_s: float
    slo_factor: float
    ttft_slo: float | None
    tpot_slo: float | None
    profile_s: float
    sequence_tokens: int
    cache: Path
    say: Callable[[str], None] = print


def turns(
    policies: list[str], loads: list[float], rounds: int, rival_rounds: int
) -> list[tuple[int, float, str]]:
    """(round, load, policy) of every window: all policies of a round and load one after the other,
    beginning with another one each time; after `rival_rounds` only those that are compared."""
    found: list[tuple[int, float, str]] = []
    for round_ in range(rounds):
        rivals = round_ < rival_rounds
        chosen = [each for each in policies if rivals or each in (BASELINE, OURS)]
        for place, load in enumerate(loads):
            turn = (round_ + place) % len(chosen)
            found += [(round_, load, policy) for policy in chosen[turn:] + chosen[:turn]]
    return found


def window_seconds(minutes: float, windows: int) -> float:
    """How long requests arrive in each of so many windows; raises `typer.BadParameter`."""
    seconds = 60.0 * minutes / windows - DRAIN_S
    if seconds < LEAST_S:
        least = windows * (LEAST_S + DRAIN_S) / 60.0
        raise typer.BadParameter(f"{windows} windows need {least:.1f} minutes at least")
    return seconds


def measure(plan: Plan, workload: Workload) -> tuple[Setup, list[Measurement]]:
    """Load all engines, find the capacity, then run every window."""
    folder = ensure_model(plan.model, plan.cache)
    threads = len(os.sched_getaffinity(0))
    common = {"device": plan.device, "dtype": plan.dtype, "threads": threads}
    common["profile"], source = _profile(plan, folder, common)
    specs = [
        WorkerSpec(name, ENGINE, options={"policy": name, "options": options, **common})
        for name, options in plan.policies.items()
    ]
    with Workers(specs, folder, plan.cache / "logs") as workers:
        alone, most = _bounds(plan, workload, workers.by_name[BASELINE])
        slo = Slo(
            plan.ttft_slo or plan.slo_factor * alone.ttft_s,
            plan.tpot_slo or plan.slo_factor * alone.tpot_s,
        )
        setup = Setup(
            describe(plan.device, threads),
            workers.by_name[BASELINE].ready["versions"],
            plan.model,
            plan.dtype,
            slo,
            alone,
            most,
            *workload.mean_tokens(),
            plan.seconds,
            plan.policies,
            source,
            plan.sequence_tokens,
        )
        plan.say(
            f"capacity {most:.2f} requests/s; objectives: TTFT {1e3 * slo.ttft_s:.0f} ms,"
            f" TPOT {1e3 * slo.tpot_s:.1f} ms"
        )
        for name, worker in workers.by_name.items():
            warm_up = workload.open_loop(0.5 * most, DRAIN_S, plan.rounds, plan.rounds + 1)
            worker.run(asdict(_prepared(warm_up, name, setup)))
        return setup, _windows(plan, setup, workload, workers)


def _profile(plan: Plan, folder: Path, common: dict[str, Any]) -> tuple[str, str]:
    """File and source of the profile that every engine starts from, measured in a process of its
    own; empty if they are to start from rates that they measure themselves."""
    if not plan.profile_s:
        return "", ""
    path = plan.cache / f"attainment-{plan.model}.profile.json"
    profile = in_new_process(profiled, settings_of(str(folder), common), plan.profile_s)
    write_profile(profile, path)
    return str(path), profile.source


def _bounds(plan: Plan, workload: Workload, worker: Worker) -> tuple[Unloaded, float]:
    """Latencies of a request alone, and the most requests/s, both without training."""
    worker.run(asdict(workload.closed_loop(8, DRAIN_S)))
    alone = worker.run(asdict(workload.closed_loop(1, plan.capacity_s / 2, ALONE_TOKENS)))
    settle_s = plan.capacity_s / 4
    crowd = worker.run(asdict(workload.closed_loop(AT_ONCE, plan.capacity_s + settle_s)))
    return unloaded(alone), capacity(crowd, settle_s)


def _windows(plan: Plan, setup: Setup, workload: Workload, workers: Workers) -> list[Measurement]:
    kept = plan.cache / f"attainment-{plan.model}.json"
    found: list[Measurement] = []
    order = turns(list(plan.policies), plan.loads, plan.rounds, plan.rival_rounds)
    for round_, load, policy in order:
        rate = load * setup.capacity
        job = workload.open_loop(rate, plan.seconds, round_, plan.rounds + 1)
        answer, others = _watched(workers.by_name[policy], _prepared(job, policy, setup))
        window = measurement(policy, load, round_, answer, others)
        found.append(window)
        kept.write_text(json.dumps({**asdict(setup), "windows": [asdict(one) for one in found]}))
        met = sum(each.meets(setup.slo) for each in window.outcomes)
        plan.say(
            f"round {round_ + 1}/{plan.rounds}  {load:.0%}  {policy:10} {met:4} of"
            f" {len(window.outcomes):4} attain,"
            f" {window.training_tokens / window.seconds:6.0f} training tokens/s"
        )
    return found


def _watched(worker: Worker, job: Job) -> tuple[dict[str, Any], float]:
    """The answer to a job, and the share of all cores that others took meanwhile."""
    own_s, busy_s, began_s = worker.cpu_s, busy_cpu_s(), time.perf_counter()
    answer = worker.run(asdict(job))
    others_s = (busy_cpu_s() - busy_s) - (worker.cpu_s - own_s)
    return answer, max(0.0, others_s / (os.cpu_count() or 1) / (time.perf_counter() - began_s))


def _prepared(job: Job, policy: str, setup: Setup) -> Job:
    """With objectives, and training for whoever trains."""
    return replace(
        job,
        train=policy != BASELINE,
        sequence_tokens=setup.sequence_tokens,
        ttft_slo=setup.slo.ttft_s,
        tpot_slo=setup.slo.tpot_s,
    )


def choose(only: list[str] | None) -> dict[str, dict[str, str]]:
    """The policies of these names, the baseline always; raises `typer.BadParameter`."""
    unknown = [name for name in only or [] if name not in POLICIES]
    if unknown:
        raise typer.BadParameter(f"no policy {unknown[0]!r}; known: {', '.join(POLICIES)}")
    wanted = {BASELINE, *(only or POLICIES)}
    return {name: dict(options) for name, options in POLICIES.items() if name in wanted}


def main(
    model: Annotated[str, typer.Option(help="llama-60m or qwen2.5-0.5b.")] = "llama-60m",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="auto (float32 on a CPU without bfloat16), or a number type.")
    ] = "auto",
    policy: Annotated[
        list[str] | None, typer.Option(help="Repeatable; no_retrain always runs; default: all.")
    ] = None,
    load: Annotated[
        list[float] | None, typer.Option(help="Repeatable, a share of the capacity.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of all windows together, about.")] = 18.0,
    rounds: Annotated[int, typer.Option(min=1, help="Windows of each policy and load.")] = 2,
    rival_rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Of those with policies other than unified; default: all."),
    ] = None,
    slo_factor: Annotated[
        float, typer.Option(help="Objectives as multiples of an unloaded request's latencies.")
    ] = 5.0,
    ttft_slo: Annotated[float | None, typer.Option(help="Seconds, instead of a multiple.")] = None,
    tpot_slo: Annotated[float | None, typer.Option(help="Seconds, instead of a multiple.")] = None,
    capacity_s: Annotated[float, typer.Option(help="How long capacity is measured.")] = 24.0,
    profile_s: Annotated[
        float,
        typer.Option(
            min=0, help="Of the profile that all start from; 0: each finds out by itself."
        ),
    ] = 60.0,
    length_scale: Annotated[float, typer.Option(help="Of the trace's lengths.")] = 0.25,
    sequence_tokens: Annotated[
        int, typer.Option(min=2, help="Of each of the two sequences of a training step.")
    ] = 512,
    option: Annotated[list[str] | None, typer.Option(help="POLICY.NAME=VALUE; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts, and of the order of lengths.")] = 0,
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    cache: Annotated[Path, typer.Option(help="Where models and logs go.")] = Path(".bench-cache"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
) -> None:
    """Measure every policy and write attainment-DEVICE.json and .md."""
    # Workers are stopped processes: they must be ended by us, not left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    trace = data / "traces" / TRACE
    if not trace.is_file():
        raise SystemExit(f"skipped: no shared data at {data}")
    loads, policies = sorted(load or LOADS), with_options(choose(policy), option or [])
    rival_rounds = rounds if rival_rounds is None else min(rounds, rival_rounds)
    seconds = window_seconds(minutes, len(turns(list(policies), loads, rounds, rival_rounds)))
    config = configs()[model]
    if sequence_tokens > config.max_position_embeddings:
        most = config.max_position_embeddings
        raise typer.BadParameter(
            f"at most {most} tokens fit {model}", param_hint="--sequence-tokens"
        )
    workload = Workload(
        read_trace(trace), config.max_position_embeddings, config.vocab_size, seed, length_scale
    )
    half = device != "cpu" or computes_in(torch.bfloat16)
    plan = Plan(
        model,
        device,
        dtype if dtype != "auto" else "bfloat16" if half else "float32",
        policies,
        loads,
        rounds,
        rival_rounds,
        seconds,
        capacity_s,
        slo_factor,
        ttft_slo,
        tpot_slo,
        profile_s,
        sequence_tokens,
        cache.resolve(),
    )
    setup, windows = measure(plan, workload)
    result = as_data(setup, windows)
    page = as_markdown(result)
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"attainment-{slug(setup.machine)}"
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    stem.with_suffix(".md").write_text(page)
    plan.say(page)


def with_options(
    policies: dict[str, dict[str, str]], given: list[str]
) -> dict[str, dict[str, str]]:
    """`policies` with options of the form POLICY.NAME=VALUE; raises `typer.BadParameter`."""
    for each in given:
        name, _, setting = each.partition(".")
        key, equals, value = setting.partition("=")
        if name not in policies or not equals:
            raise typer.BadParameter(f"{each!r} is not POLICY.NAME=VALUE of a policy that runs")
        policies[name][key] = value
    return policies


if __name__ == "__main__":
    typer.run(main)
