"""Waits between attempts at what will work again, such as writing to a store that is away.

Knows nothing of the work. Invariant: waits grow until somebody says that it worked.
"""

from __future__ import annotations

import asyncio

FIRST_S = 1.0
LONGEST_S = 60.0


class Backoff:
    """A second, then twice as long each time, up to a minute."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def reset(self) -> None:
        """It worked."""
        self._next_s = FIRST_S

    async def wait(self) -> None:
        """Before the next attempt."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, LONGEST_S)
        await asyncio.sleep(wait_s)
