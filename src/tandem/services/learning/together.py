"""Calls that are made at the same time and end as one.

`asyncio.TaskGroup` would wrap an error into a group, which nobody who waits for `EngineDead`
catches. Invariant: when `together` returns or raises, none of the calls is under way any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. The first error cancels the other calls and is raised as it is."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
