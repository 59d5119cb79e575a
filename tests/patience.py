"""How tests wait for what happens soon: until it has, or until it clearly will not.

A busy machine is no reason to fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import TypeVar

PATIENCE_S = 45.0
"""Less than a minute: then services look by themselves, and a lost wake-up would be hidden."""
START_S = 180.0
"""For what starts a process, which imports torch, loads a model and may compile its kernels."""
T = TypeVar("T")


async def until(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Wait in the event loop until `condition()` is true, which may have to be awaited; a
    `TimeoutError` if it is not."""
    async with asyncio.timeout(patience_s):
        while True:
            found = condition()
            if await found if isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


def eventually(condition: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """Wait until `condition()` is true and return that; an assertion error if it is not."""
    deadline_s = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.01)
    return found
