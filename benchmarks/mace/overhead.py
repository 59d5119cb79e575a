"""What a scheduler costs in the comparison: time per iteration and memory (table 1).

The time is the thread's own, so that other processes do not count; the memory is an account of
objects, made between two iterations. Invariant: the load is that of the comparison, simulated the
decisions too, and the account takes nothing of the time.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType

from benchmarks.mace.runs import Load, MakeEngine, Variant
from tandem.core.request import Request
from tandem.core.training import TrainingStep

# Not counted: code, and what comes in and is there whoever schedules it.
_OTHERS = (type, ModuleType, FunctionType, BuiltinFunctionType, Request, TrainingStep)
# The account is made so often during the arrivals.
_LOOKS = 10


@dataclass(frozen=True, slots=True)
class Overhead:
    """Of one variant: seconds per iteration to decide, admit and apply; most bytes that its queues,
    sequences, last plan and cache bookkeeping take (tokens included, keys and values not)."""

    variant: str
    iterations: int
    schedule_s: float
    state_bytes: int


def measure_overhead(
    variant: Variant,
    load: Load,
    make_engine: MakeEngine,
    timer: Callable[[], float] = time.thread_time,
    runs: int = 3,
) -> Overhead:
    """Both under `load`; `timer` tells seconds of work. The least time of some runs: what else the
    machine does takes its caches."""
    found = [_run(variant, load, make_engine, timer) for _ in range(runs)]
    return min(found, key=lambda run: run.schedule_s)


def _run(
    variant: Variant, load: Load, make_engine: MakeEngine, timer: Callable[[], float]
) -> Overhead:
    engine = make_engine(variant, load.profile)
    engine.loop.timer = timer
    most, due_s, every_s = 0, 0.0, load.scale.duration_s / _LOOKS

    def look(now: float) -> None:
        nonlocal most, due_s
        if now >= due_s:
            most, due_s = max(most, deep_bytes(engine.loop.scheduler)), now + every_s

    load.meet(engine, look)
    stats = engine.loop.stats()
    schedule_s = stats.schedule_s / max(1, stats.iterations)  # none if nobody came
    return Overhead(variant.name, stats.iterations, schedule_s, most)


def deep_bytes(root: object) -> int:
    """Of all objects that can be reached from it, each counted once; see `_OTHERS`."""
    seen, found, bytes_ = {id(root)}, [root], 0
    while found:
        each = found.pop()
        bytes_ += sys.getsizeof(each)
        for other in gc.get_referents(each):
            if id(other) not in seen and not isinstance(other, _OTHERS):
                seen.add(id(other))
                found.append(other)
    return bytes_
