"""Echo's setting in simulation: an 8B model on one A100 with 40 GB, or any other profile.

Invariant: the same plan gives the same runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.echo import online, runs
from benchmarks.echo.policies import Variant
from benchmarks.echo.pools import Encode, Limits, pool
from tandem.build import build_simulation
from tandem.config import Settings, resolve
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
# Of online requests without any others.
ALONE = Variant("fcfs")


@dataclass(frozen=True)
class Plan:
    """What is the same in all runs. `wanted` is the attainment of online requests alone, in the
    busiest `peak_s` seconds; `limits.scale` is of their lengths, too."""

    data: Path
    profile: Profile
    seconds: float
    slo: Slo
    limits: Limits
    max_sequences: int
    max_batch_tokens: int
    wanted: float
    peak_s: float

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.profile.info.vocab_size

    def settings_of(self, variant: Variant) -> Settings:
        """Of an engine under a policy."""
        scheduling = {
            "policy": variant.policy,
            "policy_options": variant.options,
            "ttft_slo": self.slo.ttft_s,
            "tpot_slo": self.slo.tpot_s,
            "max_sequences": self.max_sequences,
            "max_batch_tokens": self.max_batch_tokens,
        }
        return resolve({"scheduling": scheduling}, environ={})

    def load_at(self, rate: float) -> online.Load:
        """The online requests of every run."""
        return online.load(self.data, rate, self.seconds, self.limits.scale, self.vocabulary)

    def pool(self, dataset: str, encode: Encode) -> list[Request]:
        """The offline requests of a data set."""
        return pool(dataset, self.data, encode, self.limits, self.vocabulary)


def paper_profile() -> Profile:
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


def find_rate(plan: Plan, first: float) -> tuple[float, dict[float, float]]:
    """The highest rate at which online requests alone meet their objectives at the peak, and the
    attainments of the rates tried, beginning with `first`."""

    def attained(load: online.Load) -> float:
        loop, clock, executor = _engine(plan, ALONE)
        work = runs.Work("", load, [], plan.peak_s + plan.slo.ttft_s, plan.slo)
        return runs.alone(work, runs.execute(loop, clock, work, executor))

    return online.highest_rate(
        attained, plan.load_at, wanted=plan.wanted, peak_s=plan.peak_s, first=first
    )


def _engine(plan: Plan, variant: Variant) -> tuple[EngineLoop, VirtualClock, SimExecutor]:
    clock = VirtualClock()
    settings = plan.settings_of(variant)
    loop, executor = build_simulation(settings, plan.profile, clock, noise=False)
    return loop, clock, executor
