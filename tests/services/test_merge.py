"""Merged streams: nothing lost, errors passed on, everything closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from tandem.services.tasks import merge


class Sources:
    """Streams that remember whether they were closed."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    async def count(self, name: int, size: int, fails: bool = False) -> AsyncGenerator[int, None]:
        try:
            for number in range(size):
                await asyncio.sleep(0)
                yield number
            if fails:
                raise ValueError("broken")
        finally:
            self.closed.append(name)


@pytest.mark.parametrize("streams", [1, 3])
async def test_every_item_comes_with_its_place_and_in_its_order(streams: int) -> None:
    sources = Sources()
    items = [item async for item in merge([sources.count(k, 100 + k) for k in range(streams)])]
    for place in range(streams):
        assert [n for where, n in items if where == place] == list(range(100 + place))
    assert sorted(sources.closed) == list(range(streams))


@pytest.mark.parametrize("streams", [1, 3])
async def test_an_error_ends_all(streams: int) -> None:
    sources = Sources()
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge(
            [sources.count(k, 5 if k == 0 else 10**9, k == 0) for k in range(streams)]
        ):
            pass
    assert sorted(sources.closed) == list(range(streams))


@pytest.mark.parametrize("streams", [1, 3])
async def test_closing_early_closes_all(streams: int) -> None:
    sources = Sources()
    merged = merge([sources.count(k, 10**9) for k in range(streams)])
    await anext(merged)
    await merged.aclose()
    assert sorted(sources.closed) == list(range(streams))
    assert len(asyncio.all_tasks()) == 1
