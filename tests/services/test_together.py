"""Calls at the same time: the first error comes out as it is, and nothing is left running."""

from __future__ import annotations

import asyncio

import pytest

from tandem.core.errors import EngineDead
from tandem.services.tasks import together


async def test_results_come_in_order() -> None:
    async def answer(value: int) -> int:
        await asyncio.sleep(0.01 * (3 - value))
        return value

    assert await together(answer(value) for value in range(3)) == [0, 1, 2]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_error_or_a_cancellation_ends_all(cancelled: bool) -> None:
    ended: list[int] = []

    async def wait(place: int) -> None:
        try:
            await asyncio.sleep(0.01 if place == 1 and not cancelled else 60.0)
        finally:
            ended.append(place)
        raise EngineDead("gone")

    task = asyncio.create_task(together(wait(place) for place in range(3)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if cancelled:
        task.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else EngineDead):
        await task
    assert sorted(ended) == [0, 1, 2]
