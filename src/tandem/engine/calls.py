"""Calls to an engine that are under way: their numbers, who waits for each, and who has left.

Knows answers, not what is asked. Invariant: every caller gets its result, the engine's failure or
`EngineDead`; a version that was loaded for a caller who has left is handed to `unclaimed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import TypeVar

import msgspec

from tandem.core.errors import EngineDead
from tandem.core.version import AdapterVersion
from tandem.engine.messages import CallResult, to_exception

Result = TypeVar("Result")


class Calls:
    """Of one client; used in one event loop. `unclaimed` gets each version that was loaded for
    somebody who has left."""

    def __init__(self, unclaimed: Callable[[AdapterVersion], None]) -> None:
        self._unclaimed = unclaimed
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[CallResult]] = {}
        self._early: dict[int, CallResult] = {}
        """Answers that came after their callers were cancelled and before these noticed."""
        self._left: set[int] = set()
        """Calls that load a version, whose callers do not wait for it any more."""

    def number(self) -> int:
        """A new call's."""
        return next(self._numbers)

    async def result(self, kind: type[Result], send: Callable[[int], None]) -> Result:
        """Send a call by its number and wait for its result, which is of `kind`."""
        call = self.number()
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self._waiting[call] = future
        try:
            send(call)
            answer = await future
        except asyncio.CancelledError:
            if kind is AdapterVersion:
                self._leave(call, future)
            raise
        finally:
            del self._waiting[call]
            self._early.pop(call, None)
        if answer.failure is not None:
            raise to_exception(answer.failure)
        return _as(kind, answer.result)

    def take(self, answer: CallResult) -> None:
        """Hand an answer to whoever waits for it."""
        future = self._waiting.get(answer.call)
        if future is not None and not future.done():
            future.set_result(answer)
        elif future is not None and future.cancelled():
            self._early[answer.call] = answer
        elif answer.call in self._left:
            self._left.discard(answer.call)
            self._give_up(answer)

    def _leave(self, call: int, future: asyncio.Future[CallResult]) -> None:
        """The caller leaves; its answer may have come, although it has not seen it."""
        if call in self._early:
            self._give_up(self._early[call])
        elif not future.done() or future.cancelled():
            self._left.add(call)
        elif future.exception() is None:
            self._give_up(future.result())

    def _give_up(self, answer: CallResult) -> None:
        if answer.failure is None:
            self._unclaimed(_as(AdapterVersion, answer.result))

    def lose(self, reason: str) -> None:
        """The engine is gone, and no answer will come."""
        self._left.clear()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDead(reason))


def _as(kind: type[Result], result: object) -> Result:
    """A result as its type; over a process's boundary it came as plain data."""
    return result if isinstance(result, kind) else msgspec.convert(result, kind)
