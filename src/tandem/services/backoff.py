"""Waits between attempts at what will work again, such as writing to a store that is away.

Knows nothing of the work. Invariant: waits grow until somebody says that it worked.
"""

from __future__ import annotations

import asyncio

FIRST_S = 1.0
LONGEST_S = 60.0


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
