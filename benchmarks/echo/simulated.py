"""Echo's setting in simulation: an 8B model on one A100 with 40 GB.

Knows the profile and how a run is made. Invariant: the same plan gives the same runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.echo import online, runs
from benchmarks.echo.policies import Variant
from benchmarks.echo.pools import Limits, encoder, pool
from tandem.build import build_simulation
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.request import Request
from tandem.core.slo import Slo
from tandem.engine.loop import EngineLoop
from tandem.estimators.datasheet import DEVICES, SHAPES, compute_profile
from tandem.estimators.profile import Profile
from tandem.sim.executor import SimExecutor

DEVICE, SHAPE = "a100-40g", "llama-3-8b"
# Llama 3.1 8B is Llama 3 8B with a longer context.
NAME, CONTEXT = "llama-3.1-8b", 131_072
# Of the device's memory, for weights and KV (vLLM's default).
MEMORY_SHARE = 0.9
ALONE = Variant("priority")


@dataclass(frozen=True)
class Plan:
    """What is the same in all runs; `rate` in online requests/s."""

    data: Path
    seconds: float
    slo: Slo
    limits: Limits
    max_sequences: int
    max_batch_tokens: int
    wanted: float
    peak_s: float


def profile() -> Profile:
    """The device's data sheet, with all memory below `MEMORY_SHARE` that weights leave for KV."""
    device, shape = DEVICES[DEVICE], replace(SHAPES[SHAPE], name=NAME, context=CONTEXT)
    found = compute_profile(device, shape)
    room = device.memory_bytes * MEMORY_SHARE - found.info.weight_bytes
    blocks = int(room // (shape.kv_bytes * found.info.block_size))
    context = min(CONTEXT, blocks * found.info.block_size)
    return replace(found, info=replace(found.info, num_blocks=blocks, max_model_len=context))


def simulate(
    plan: Plan,
    name: str,
    variant: Variant,
    work: runs.Work,
    on_progress: Callable[[float], None] = lambda now: None,
) -> runs.Run:
    """One run."""
    loop, clock, executor = _engine(plan, variant)
    return runs.figures(name, work, loop, runs.execute(loop, clock, work, executor, on_progress))


def find_rate(plan: Plan) -> tuple[float, dict[float, float]]:
    """The highest rate at which online requests alone meet their objectives at the peak, and the
    attainments of the rates tried."""

    def load_at(rate: float) -> online.Load:
        return online.load(plan.data, rate, plan.seconds, 1.0, profile().info.vocab_size)

    def attained(load: online.Load) -> float:
        loop, clock, executor = _engine(plan, ALONE)
        seconds = plan.peak_s + plan.slo.ttft_s
        work = runs.Work("", load, [], seconds, plan.slo)
        report, _ = runs.execute(loop, clock, work, executor)
        return runs.attained(
            runs.due(list(report.outcomes.values()), work, report.ended_s), plan.slo
        )

    return online.highest_rate(attained, load_at, wanted=plan.wanted, peak_s=plan.peak_s, first=8.0)


def offline_of(plan: Plan, dataset: str) -> list[Request]:
    """The pool of a data set."""
    encode = encoder(plan.data)
    return pool(dataset, plan.data, encode, plan.limits, profile().info.vocab_size)


def _engine(plan: Plan, variant: Variant) -> tuple[EngineLoop, VirtualClock, SimExecutor]:
    scheduling = {
        "policy": variant.policy,
        "policy_options": variant.options,
        "ttft_slo": plan.slo.ttft_s,
        "tpot_slo": plan.slo.tpot_s,
        "max_sequences": plan.max_sequences,
        "max_batch_tokens": plan.max_batch_tokens,
    }
    clock = VirtualClock()
    settings = resolve({"scheduling": scheduling}, environ={})
    loop, executor = build_simulation(settings, profile(), clock, noise=False)
    return loop, clock, executor
