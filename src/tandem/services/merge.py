"""Several asynchronous streams as one, in order of arrival.

Knows nothing of what flows. Invariant: when the merged stream ends, fails or is closed, every
source is closed and no task is left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")
_BUFFERED_ITEMS = 64


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
