"""What a decision costs: policies at many running sequences, a long offline queue, many steps.

Once with as many online requests as there are places, and once with fewer. No model and no device:
plans are answered at once, sequences end and come at random (churn). Times are of
`Scheduler.schedule` (decide and admit) and `apply`, on one core.
"""

from __future__ import annotations

import gc
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any

import typer

from benchmarks.reporting.machine import describe, slug
from tandem.bench.measure import percentile
from tandem.core.events import ModelInfo
from tandem.core.plan import (
    DrawResult,
    LanePlan,
    ScoreResult,
    SliceResult,
    StepPlan,
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
from tandem.scheduling.registry import build_policy, known_policies
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.state import class_of
from tandem.scheduling.view import Budgets

INFO = ModelInfo(
    model="none", architecture="none", device="none", dtype="none", vocab_size=32_000,
    max_model_len=4096, eos_token_ids=(), block_size=16, num_blocks=40_000,
    num_parameters=8 * 10**9, weight_bytes=16 * 10**9, kernels="none", num_layers=32,
    recording_tokens=8192,
)  # fmt: skip
RATES = Rates(
    forward=(
        0.012, 5e-5, 1e-4, 1e-6, 1e-6, 5e-5, 1e-4, 1e-5, 2e-5, 1e-3, 1e-6, 1e-3, 1e-6, 1e-3,
    ),
    slices=(5e-4, 5e-5, 2e-6, 1e-5, 5e-5, 5e-5, 1e-6, 5e-6, 4e-7, 1e-3, 1e-6),
    update_s=3e-3,
    rho=0.2,
    measured=True,
    slices_measured=True,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """What the scheduler holds all the time: `places` for sequences that run, and requests and
    steps that want them."""

    places: int = 256
    online: int = 256
    offline: int = 2000
    steps: int = 50


LOADS = (Load(), Load(online=192))
KINDS = tuple(WorkClass)


@dataclass(slots=True)
class Measured:
    """Seconds of each `schedule` and `apply`, and how much each plan had."""

    schedule_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)
    spans: dict[str, list[int]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    learns: list[bool] = field(default_factory=list)


def measure(policy: str, load: Load, iterations: int, seed: int = 0) -> Measured:
    """So many iterations, after a warm-up of a tenth."""
    rng, device = Random(seed), LatencyModel(RATES)
    scheduler = Scheduler(
        build_policy(policy),
        KVCache(INFO.num_blocks, INFO.block_size),
        Budgets(load.places, 2048),
        INFO,
        rates=RATES,
    )
    made = 0
    for number in range(load.steps):
        scheduler.learning.open_trainer(TrainerState(f"trainer-{number}", 0, 0))
    now, found = 0.0, Measured()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # as the engine process has it
    for iteration in range(iterations + iterations // 10):
        while _count(scheduler, WorkClass.ONLINE) < load.online:
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
        known, spans = scheduler.state.all, [span for lane in plan.lanes for span in lane.spans]
        classes = Counter(class_of(known[span.seq_id]) for span in spans)
        resumed = time.perf_counter()
        scheduler.apply(results, now)
        applied = time.perf_counter()
        scheduler.learning.take_ended()
        if iteration >= iterations // 10:
            found.schedule_s.append(decided - began)
            found.apply_s.append(applied - resumed)
            for kind in KINDS:
                found.spans[kind].append(classes[kind])
            found.learns.append(_learns(plan))
    return found


def _count(scheduler: Scheduler, work_class: WorkClass) -> int:
    sequences = scheduler.state.all.values()
    return sum(class_of(seq) is work_class for seq in sequences)


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
    device.after(forward_s)
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


def run(policy: str, load: Load, iterations: int) -> dict[str, Any]:
    """What is written of a policy under a load."""
    measured = measure(policy, load, iterations)
    return {
        "schedule": describe_times(measured.schedule_s),
        "apply": describe_times(measured.apply_s),
        "spans": {kind: fmean(numbers) for kind, numbers in measured.spans.items()},
        "learning": fmean(measured.learns),
    }


def _learns(plan: StepPlan) -> bool:
    return any(
        lane.slices or lane.updates or any(span.score_targets for span in lane.spans)
        for lane in plan.lanes
    )


def describe_times(values: Sequence[float]) -> dict[str, float]:
    """Milliseconds: p10 (what other processes disturb least), median, p99 and the largest."""
    ordered = sorted(values)
    shares = {"p10": 0.1, "p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: 1e3 * percentile(ordered, share) for name, share in shares.items()}


def as_markdown(data: dict[str, Any]) -> str:
    """A page with a table for each load."""
    machine = ", ".join(f"{name}: {value}" for name, value in data["machine"].items())
    lines = ["# What a decision costs", "", machine, "", f"{data['iterations']} iterations a row."]
    for found in data["loads"]:
        load = found["load"]
        lines += [
            "",
            f"## {load['online']} online requests, {load['places']} places",
            "",
            f"{load['places']} sequences at most run at once. {load['online']} online requests, "
            f"{load['offline']} offline requests and {load['steps']} training steps are there all "
            "the time; sequences end and come. Milliseconds; spans of a plan on average, by class, "
            "and how many of all plans learn.",
            "",
            "| policy | decide and admit: p50 | p99 | max | apply: p50 | p99 "
            "| online, offline, learning spans | learn |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for policy, row in found["policies"].items():
            decide, apply = row["schedule"], row["apply"]
            spans = ", ".join(f"{row['spans'][kind]:.1f}" for kind in KINDS)
            lines.append(
                f"| `{policy}` | {decide['p50']:.2f} | {decide['p99']:.2f} | {decide['max']:.2f} "
                f"| {apply['p50']:.2f} | {apply['p99']:.2f} "
                f"| {spans} | {row['learning']:.0%} |"
            )
    return "\n".join([*lines, ""])


def main(
    iterations: Annotated[int, typer.Option(help="Of each policy.")] = 1000,
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
) -> None:
    """Measure and write scheduler-DEVICE.json and .md."""
    loads = []
    # Each in a process of its own: what one leaves in memory makes the next a third slower.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for load in LOADS:
            rows: dict[str, Any] = {}
            for name in policy or known_policies():
                rows[name] = pool.apply(run, (name, load, iterations))
                print(load.online, name, rows[name])
            loads.append({"load": asdict(load), "policies": rows})
    machine = describe("cpu", 1)
    data = {"machine": machine, "iterations": iterations, "loads": loads}
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"scheduler-{slug(machine)}"
    stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    page = as_markdown(data)
    stem.with_suffix(".md").write_text(page)
    print(page)


if __name__ == "__main__":
    typer.run(main)
