"""How much of all batches is in the engine at once, so that any number of lines needs bounded
memory.

Knows sizes only. Invariant: what was taken is given back, and whoever waits longest goes first.
"""

from __future__ import annotations

import asyncio


class Pool:
    """Room for so many lines with so many tokens together; one line always fits."""

    def __init__(self, most_lines: int, most_tokens: int) -> None:
        self._most_lines = most_lines
        self._most_tokens = most_tokens
        self._lines = 0
        self._tokens = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, tokens: int) -> int:
        """Wait for room; what has to be given back."""
        tokens = min(tokens, self._most_tokens)
        async with self._turn:
            while self._lines >= self._most_lines or self._tokens + tokens > self._most_tokens:
                self._freed.clear()
                await self._freed.wait()
            self._lines += 1
            self._tokens += tokens
        return tokens

    def give_back(self, tokens: int) -> None:
        """A line has ended."""
        self._lines -= 1
        self._tokens -= tokens
        self._freed.set()
