"""What a decision costs: policies at many running sequences, a long offline queue, many steps.

No model and no device: plans are answered at once, sequences end and come at random (churn). Times
are of `Scheduler.schedule` (decide and admit) and `apply`, on one core.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from peers.machine import describe, slug
from tandem.bench.measure import percentile
from tandem.build import build_policy, known_policies
from tandem.core.events import ModelInfo
from tandem.core.plan import (
    DrawResult,
    LanePlan,
    ScoreResult,
    SliceResult,
    StepResult,
    UpdateResult,
)
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import WorkClass
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    TrainerState,
    TrainingSequence,
    TrainingStep,
)
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.work import PassWork
from tandem.kv.cache import KVCache
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets

INFO = ModelInfo(
    model="none", architecture="none", device="none", dtype="none", vocab_size=32_000,
    max_model_len=4096, eos_token_ids=(), block_size=16, num_blocks=40_000,
    num_parameters=8 * 10**9, weight_bytes=16 * 10**9, kernels="none", num_layers=32,
    recording_tokens=8192,
)  # fmt: skip
RATES = Rates(
    forward=(0.012, 5e-5, 1e-4, 1e-6, 1e-6, 5e-5, 1e-4, 1e-5, 2e-5, 1e-3, 1e-6),
    slices=(5e-4, 5e-5, 2e-6, 5e-5, 1e-6, 4e-7, 1e-3, 1e-6),
    update_s=3e-3,
    rho=0.2,
    measured=True,
    slices_measured=True,
)


@dataclass(frozen=True, slots=True)
class Load:
    """What the scheduler holds all the time."""

    running: int = 256
    offline: int = 2000
    steps: int = 50


def measure(policy: str, load: Load, iterations: int, seed: int = 0) -> dict[str, list[float]]:
    """Seconds of each `schedule` and `apply`, after a warm-up of a tenth."""
    rng, device = Random(seed), LatencyModel(RATES)
    scheduler = Scheduler(
        build_policy(policy),
        KVCache(INFO.num_blocks, INFO.block_size),
        Budgets(load.running, 2048),
        INFO,
        rates=RATES,
    )
    made = 0
    for number in range(load.steps):
        scheduler.learning.open_trainer(TrainerState(f"trainer-{number}", 0, 0))
    now, times = 0.0, {"schedule": [], "apply": []}
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # as the engine process has it
    for iteration in range(iterations + iterations // 10):
        while _count(scheduler, WorkClass.ONLINE) < load.running:
            scheduler.add(_request(made, rng, WorkClass.ONLINE, now), None)
            made += 1
        while _count(scheduler, WorkClass.OFFLINE) < load.offline:
            scheduler.add(_request(made, rng, WorkClass.OFFLINE, now), None)
            made += 1
        for number in range(load.steps):
            if len(scheduler.learning.queued) < load.steps:
                scheduler.learning.add_step(_step(made, number, rng), now)
                made += 1
        scheduler.wake()
        began = time.perf_counter()
        plan = scheduler.schedule(now)
        decided = time.perf_counter()
        if plan is None:
            now += 0.01
            continue
        results = [_result(lane, device) for lane in plan.lanes]
        now += results[0].elapsed_s
        resumed = time.perf_counter()
        scheduler.apply(results, now)
        applied = time.perf_counter()
        scheduler.learning.take_ended()
        if iteration >= iterations // 10:
            times["schedule"].append(decided - began)
            times["apply"].append(applied - resumed)
    return times


def _count(scheduler: Scheduler, work_class: WorkClass) -> int:
    sequences = scheduler.state.all.values()
    return sum(s.scoring is None and s.request.work_class is work_class for s in sequences)


def _request(number: int, rng: Random, work_class: WorkClass, now: float) -> Request:
    prompt = tuple(rng.choices(range(INFO.vocab_size), k=rng.randint(16, 256)))
    sampling = SamplingParams(max_tokens=rng.randint(8, 256), temperature=0.0, ignore_eos=True)
    return Request(f"r{number}", prompt, sampling, work_class=work_class, arrival_s=now)


def _step(number: int, trainer: int, rng: Random) -> TrainingStep:
    pairs = tuple(
        TrainingSequence(tuple(rng.choices(range(INFO.vocab_size), k=64)), 32, role)
        for role in (Role.CHOSEN, Role.REJECTED)
    )
    return TrainingStep(f"s{number}", f"trainer-{trainer}", LossSpec(LossKind.DPO), (pairs,))


def _result(lane: LanePlan, device: LatencyModel) -> StepResult:
    forward_s = device.forward_s(PassWork.of(lane))
    draws = tuple(DrawResult(d.seq_id, d.position % 99) for s in lane.spans for d in s.draws)
    scores = tuple(ScoreResult(s.seq_id, s.start, (), -1.0) for s in lane.spans if s.score_targets)
    slices = tuple(SliceResult(p.micro_batch, p.hi, p.lo, 5e-3) for p in lane.slices)
    updates = tuple(
        UpdateResult(u.trainer, u.revision + 1, True, 1.0, 1e-4, 3e-3) for u in lane.updates
    )
    elapsed_s = forward_s + 5e-3 * len(slices) + 3e-3 * len(updates)
    return StepResult(
        lane.step, lane.lane, elapsed_s, draws, scores, (), forward_s, slices, updates
    )


def describe_times(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds: p10 (what other processes disturb least), median, p99 and the largest."""
    ordered = sorted(values)
    shares = {"p10": 0.1, "p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: 1e3 * percentile(ordered, share) for name, share in shares.items()}


def as_markdown(data: dict[str, Any]) -> str:
    """A page with the table."""
    machine = ", ".join(f"{name}: {value}" for name, value in data["machine"].items())
    load = data["load"]
    lines = [
        "# What a decision costs",
        "",
        machine,
        "",
        f"{load['running']} running sequences, {load['offline']} offline requests and "
        f"{load['steps']} training steps are there all the time; sequences end and come. "
        f"{data['iterations']} iterations; milliseconds.",
        "",
        "| policy | decide and admit: p50 | p99 | max | apply: p50 | p99 |",
        "|---|---|---|---|---|---|",
    ]
    for policy, row in data["policies"].items():
        decide, apply = row["schedule"], row["apply"]
        lines.append(
            f"| `{policy}` | {decide['p50']:.2f} | {decide['p99']:.2f} | {decide['max']:.2f} "
            f"| {apply['p50']:.2f} | {apply['p99']:.2f} |"
        )
    return "\n".join([*lines, ""])


def main(
    iterations: Annotated[int, typer.Option(help="Of each policy.")] = 1000,
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
) -> None:
    """Measure and write scheduler-DEVICE.json and .md."""
    load = Load()
    rows = {}
    for name in policy or known_policies():
        found = measure(name, load, iterations)
        rows[name] = {part: describe_times(values) for part, values in found.items()}
        print(name, rows[name])
    machine = describe("cpu", 1)
    data = {
        "machine": machine,
        "load": {"running": load.running, "offline": load.offline, "steps": load.steps},
        "iterations": iterations,
        "policies": rows,
    }
    stem = out / f"scheduler-{slug(machine)}"
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    page = as_markdown(data)
    stem.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    typer.run(main)
