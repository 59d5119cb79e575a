"""What asyncio lacks: work that nobody may interrupt, calls that end as one, streams merged in
order of arrival, and waits between attempts.

Knows nothing of the work. Invariant: whatever ends a call here, no task of it is left behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

FIRST_S = 1.0
LONGEST_S = 60.0
_BUFFERED_ITEMS = 64
Item = TypeVar("Item")
Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work` to its end. Raises what it raises; `CancelledError`, after that end, if the caller
    was cancelled meanwhile."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (problem := task.exception()) is not None:
        logger.warning("what was under way failed: %s", problem)
    raise cancelled


async def together(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in order. The first error cancels the other calls and is raised as it is: a
    `TaskGroup` would wrap it into a group, which nobody who waits for `EngineDead` catches."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def merge(
    sources: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all sources, each with the place of its source; the first error ends them all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | _Ended] = asyncio.Queue(_BUFFERED_ITEMS)
    tasks = [
        asyncio.create_task(_forward(place, source, queue)) for place, source in enumerate(sources)
    ]
    try:
        for _ in tasks:
            while not isinstance(received := await queue.get(), _Ended):
                yield received
            if received.error is not None:
                raise received.error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Ended:
    """A source has no more items; `error` tells why if it failed."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


async def _forward(
    place: int,
    source: AsyncGenerator[Item, None],
    queue: asyncio.Queue[tuple[int, Item] | _Ended],
) -> None:
    error: Exception | None = None
    try:
        async with aclosing(source):
            async for item in source:
                await queue.put((place, item))
    except Exception as caught:
        error = caught
    await queue.put(_Ended(error))


class Backoff:
    """`first_s` (a second), then twice as long each time, up to `longest_s` (a minute)."""

    def __init__(self, first_s: float | None = None, longest_s: float | None = None) -> None:
        self._first_s = FIRST_S if first_s is None else first_s
        self._longest_s = LONGEST_S if longest_s is None else longest_s
        self._next_s = self._first_s

    def reset(self) -> None:
        """It worked."""
        self._next_s = self._first_s

    async def wait(self) -> None:
        """Before the next attempt."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        await asyncio.sleep(wait_s)
