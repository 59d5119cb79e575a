"""A process that learns and dies without a word at a given point. Started by test_recovery.py."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from fake_engine import FakeEngine
from learning_world import join
from tandem.core.training import TrainingStep
from tandem.services.learning.recovery import recover
from tandem.store import Store


def learn_and_die(directory: Path, point: str, nth: int) -> None:
    """What the process does."""
    asyncio.run(_learn(directory, point, nth))


async def _learn(directory: Path, point: str, nth: int) -> None:
    """Accept ten samples and learn from them, until `point` is reached for the `nth` time."""
    reached = 0

    def at(here: str) -> None:
        nonlocal reached
        reached += here == point
        if reached == nth:
            os._exit(9)

    def judge(step: TrainingStep) -> str | None:
        at("step")
        return None

    store = Store.open(directory)
    made = join(FakeEngine(judge=judge), store, directory, at=at)
    await recover(made.tools, directory)
    await made.give([*(made.sample() for _ in range(10)), *made.held_out(2)])
    at("accepted")
    await made.learner.start()
    await asyncio.sleep(3600)
