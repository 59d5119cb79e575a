"""Engines of the MACE comparison: simulated ones, and real ones over one model that is loaded once.

All simulated ones have the same budgets, and so have all real ones. Objectives come with requests.
"""

from __future__ import annotations

import gc
from dataclasses import replace

from benchmarks.mace.runs import Engine, MakeEngine, Variant
from tandem.build import build_executor, build_simulation, join_loop, resolve_model
from tandem.config import Settings, resolve
from tandem.core.clock import SleepingClock, VirtualClock
from tandem.core.ports import Executor
from tandem.engine.client import Progress
from tandem.engine.loop import EngineLoop
from tandem.estimators.profile import Profile
from tandem.sim.timeline import Timeline

# Of real ones a sixth, as of the lengths.
_BATCH_TOKENS, _SMALL_BATCH_TOKENS = 2048, 341
KV_BYTES = 512 << 20


def settings_of(variant: Variant, batch_tokens: int = _BATCH_TOKENS) -> Settings:
    """Of a variant's engine."""
    return resolve(
        {
            "scheduling": {
                "policy": variant.policy,
                "policy_options": dict(variant.options),
                "max_sequences": variant.max_sequences,
                "max_batch_tokens": batch_tokens,
            },
            "cache": {"prefix_caching": variant.prefix_caching},
        }
    )


def make_engine(variant: Variant, profile: Profile) -> Engine:
    """A simulated engine of a variant, with a clock of its own."""
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    return Engine(make_loop(variant, profile, clock, timeline), clock, timeline)


def make_loop(
    variant: Variant, profile: Profile, clock: VirtualClock, timeline: Timeline
) -> EngineLoop:
    """The simulated engine of a variant."""
    loop, _ = build_simulation(settings_of(variant), profile, clock, on_plan=timeline)
    return loop


def load_engine(model: str, progress: Progress) -> tuple[Executor, Settings]:
    """`model` (`demo`, a directory or a name) on this machine's CPU. Raises as loading does."""
    settings = resolve({"model": {"model": model, "device": "cpu"}})
    room = replace(settings.cache, memory_bytes=KV_BYTES)
    any_variant = Variant("any", "no_retrain")
    limits = settings_of(any_variant, batch_tokens=_SMALL_BATCH_TOKENS).scheduling
    settings = resolve_model(replace(settings, cache=room, scheduling=limits))
    return build_executor(settings, progress), settings


def engines_over(executor: Executor, window_s: float = 10.0) -> MakeEngine:
    """Makes engines over `executor`, one at a time, each with an empty cache; `ekya` opens a window
    every `window_s`."""

    def make(variant: Variant, profile: Profile) -> Engine:
        gc.collect()  # of the engine before, rather than during this one's iterations
        if variant.policy == "ekya":
            variant = replace(variant, options={"interval_s": str(window_s)})
        clock = SleepingClock()
        settings = settings_of(variant, _SMALL_BATCH_TOKENS)
        loop = join_loop(settings, executor, clock=clock, rates=profile.rates)
        loop.on_plan = timeline = Timeline(clock.now)
        return Engine(loop, clock, timeline)

    return make
