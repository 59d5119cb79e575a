"""Looks at an engine between two iterations: who holds KV blocks, what is cached and predicted.

For `Simulation.run(on_progress=...)`. Reads the scheduler's state and changes nothing. Invariant:
the parts of a sample add up to all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.engine.loop import EngineLoop


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment. A shared block counts once; `predicted` is mu + 2 sigma of `demand`, from earlier
    samples."""

    at_s: float
    online: int  # running requests
    offline: int
    held_online: int  # KV blocks of running requests
    held_offline: int  # the others that are held
    cached_read: int  # without a holder: some waiting request will read them
    cached_online: int  # no waiting request will; an online one has used them
    cached_rest: int
    free: int
    demand: int
    predicted: float


class Watch:
    """Samples of one run."""

    def __init__(self, loop: EngineLoop) -> None:
        self._scheduler = loop.scheduler
        self.samples: list[Sample] = []

    def __call__(self, now: float) -> None:
        """Take a sample."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        sequences: dict[WorkClass, list[Sequence]] = {each: [] for each in WorkClass}
        for seq in scheduler.state.running.values():
            sequences[seq.request.work_class].append(seq)
        online = sequences[WorkClass.ONLINE]
        tables = [cache.table(seq, len(seq.tokens))[0] for seq in online]
        held_online = len(set(chain.from_iterable(tables)))
        idle = cache.idle_blocks()
        read = sum(block.readers > 0 for block in idle)
        left = sum(block.online and not block.readers for block in idle)
        self.samples.append(
            Sample(
                now,
                len(online),
                len(sequences[WorkClass.OFFLINE]),
                held_online,
                cache.held_blocks - held_online,
                read,
                left,
                len(idle) - read - left,
                cache.free_blocks,
                cache.held_by_rank[0],
                scheduler.demand.demand,
            )
        )
