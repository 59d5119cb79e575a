"""Bodies on their way in: how many bytes of them are held, how long one may take, who is checked.

A layer between the server and the routes, so that no route can forget it. Small bodies always come
in; larger ones share a budget, and one that finds none is told to come again. Invariant: what was
counted is given back when its request ends, in whichever way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.types import Message, Receive, Scope

from tandem.api.entrance import UPLOADS
from tandem.api.errors import TooSlow
from tandem.core.errors import Overloaded

_SMALL_BYTES = 64 * 1024
_LARGE_BYTES = 256 * 1024
_LARGE_SHARE = 1 / 32  # of the time may go into checks of large bodies
_SPOOLED_BYTES = 1 << 20  # of an upload; the rest goes to disk
_BODIES = 16  # of the largest size
_PATIENCE_S = 60.0
_SLOWEST_BYTES_A_S = 16 * 1024
_RETRY_S = 2.0
Result = TypeVar("Result")


class Bodies:
    """The budget of one server; one body has at most `max_body_bytes`.

    A body may take `patience_s` and what its bytes take at 16 KiB/s, and each part of it
    `patience_s`.
    """

    def __init__(self, max_body_bytes: int, patience_s: float = _PATIENCE_S) -> None:
        self.max_body_bytes = max_body_bytes
        self._budget = _BODIES * max(max_body_bytes, _SPOOLED_BYTES)
        self._patience_s = patience_s
        self._held = 0
        self._turn = asyncio.Lock()
        self._next_s = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes of larger bodies whose requests have not ended."""
        return self._held

    @contextmanager
    def taking(self, scope: Scope, receive: Receive) -> Iterator[Receive]:
        """A `receive` for this request, which raises `Overloaded` or `TooSlow`."""
        most = _SPOOLED_BYTES if scope["path"] in UPLOADS else self.max_body_bytes
        incoming = _Incoming(self, receive, most, self._patience_s)
        try:
            yield incoming.receive
        finally:
            self._held -= incoming.held

    async def check(self, raw: bytes, work: Callable[[], Result]) -> Result:
        """The result of `work` on a body, which runs beside the event loop unless it is small.

        A parser keeps the interpreter's lock until it is done, so large bodies come one at a time,
        and after each there is a rest.
        """
        if len(raw) <= _SMALL_BYTES:
            return work()
        if len(raw) <= _LARGE_BYTES:
            return await asyncio.to_thread(work)
        loop = asyncio.get_running_loop()

        def timed() -> Result:
            begun_s = time.thread_time()
            try:
                return work()
            finally:
                took_s = time.thread_time() - begun_s
                self._next_s = loop.time() + took_s / _LARGE_SHARE

        async with self._turn:
            await asyncio.sleep(max(0.0, self._next_s - loop.time()))
            return await asyncio.to_thread(timed)

    def take(self, size_bytes: int) -> None:
        """Count bytes that came. Raises `Overloaded`."""
        if self._held + size_bytes > self._budget:
            raise Overloaded(
                "the server holds too many large request bodies; try again, or send less",
                retry_after_s=_RETRY_S,
            )
        self._held += size_bytes


class _Incoming:
    """One body; `held` are the bytes of it that were counted."""

    def __init__(self, bodies: Bodies, receive: Receive, most: int, patience_s: float) -> None:
        self.held = 0
        self._bodies = bodies
        self._receive = receive
        self._most = most
        self._patience_s = patience_s
        self._begun_s = asyncio.get_running_loop().time()
        self._size = 0
        self._complete = False

    async def receive(self) -> Message:
        """The next part; once the body is complete, what the server says of the client."""
        if self._complete:
            return await self._receive()
        passed_s = asyncio.get_running_loop().time() - self._begun_s
        left_s = self._patience_s + self._size / _SLOWEST_BYTES_A_S - passed_s
        try:
            async with asyncio.timeout(min(left_s, self._patience_s)):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow(
                f"the body did not come in time: {self._size} bytes in {passed_s:.0f} s"
            ) from None
        self._size += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        counted = 0 if self._size <= _SMALL_BYTES else min(self._size, self._most)
        if counted > self.held:
            self._bodies.take(counted - self.held)
            self.held = counted
        return message
