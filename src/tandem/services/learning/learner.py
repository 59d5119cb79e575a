"""Keeps every adapter that has new samples learning, a bounded number of them at once.

One task for each such adapter; it ends its turn when nothing is left to learn. Knows no HTTP.
Invariant: an error of one adapter delays that adapter and no other, and never ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import takewhile

from tandem.core.errors import DiskError, EngineDead, NoMemory, TandemError, TrainingCancelled
from tandem.core.learning import SampleState, Split
from tandem.services.learning.course import Course, Progress
from tandem.services.learning.publish import NoRoom, engine_ready
from tandem.services.learning.tools import LearningTools
from tandem.services.tasks import Backoff
from tandem.store import Connection, adapters, samples

logger = logging.getLogger(__name__)

_AT_ONCE = 2
_POLL_S = 2.0
_SOON_S = 1.0
_REST_AFTER_S = 60.0
_LOOK_FOR_ROOM_S = 2.0
_MAKE_ROOM_S = 5.0
# A whole version may have been trained in vain before the disk refuses it.
_DISK_FIRST_S = 10.0
_DISK_LONGEST_S = 300.0


@dataclass(slots=True)
class _Troubles:
    """What has kept one adapter from learning since it last learned: the last trouble that was
    told, and how long the next one waits."""

    told: str = ""
    others: Backoff = field(default_factory=Backoff)
    disk: Backoff = field(default_factory=lambda: Backoff(_DISK_FIRST_S, _DISK_LONGEST_S))

    def new(self, trouble: str) -> bool:
        """Whether it is another one than the last."""
        before, self.told = self.told, trouble
        return trouble != before


class Learner:
    """The learning of all adapters. `start` and `stop` run in the server's event loop."""

    def __init__(self, tools: LearningTools) -> None:
        self._tools = tools
        self._courses: dict[str, Course] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._crowded_s = float("-inf")

    async def start(self) -> None:
        """Begin to learn. `recovery.py` has put the state in order before."""
        self._watching = asyncio.create_task(self._watch(), name="learner")

    async def stop(self) -> None:
        """End learning; a version that is just being published is finished first."""
        tasks = [*self._tasks.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._watching = None

    def notify(self, adapter: str) -> None:
        """There may be new samples for `adapter`. Saves the wait for the next look."""
        if self._watching is None:
            return
        self._wake.setdefault(adapter, asyncio.Event()).set()
        if adapter not in self._tasks:
            self._tasks[adapter] = asyncio.create_task(
                self._teach(adapter), name=f"learn {adapter}"
            )

    def ahead_of(self, adapter: str) -> list[str]:
        """Adapters that have begun to learn before `adapter` and still do."""
        return list(takewhile(lambda name: name != adapter, self._tasks))

    def took_s(self, adapter: str) -> float | None:
        """Seconds that the last version of `adapter` took to make; None before the first."""
        course = self._courses.get(adapter)
        return None if course is None else course.took_s

    @asynccontextmanager
    async def held(self, adapter: str) -> AsyncIterator[None]:
        """Nothing of `adapter` is trained inside, and what was under way is given up.

        For roll back, import, deletion and erasure; learning goes on afterwards from the version
        that is current then. Where what is done inside fails, what is committed is looked up.
        """
        course = self._course(adapter)
        try:
            async with course.held():
                yield
        except BaseException:
            course.doubtful = True
            raise
        finally:
            self.notify(adapter)

    @asynccontextmanager
    async def settled(self, adapter: str) -> AsyncIterator[None]:
        """No version of `adapter` is made or adopted inside; what is under way is waited for."""
        async with self._course(adapter).settled():
            yield

    async def keep_loaded(self, adapter: str) -> None:
        """Make what was loaded by hand as `adapter` a version of it, if so. Raises `AdapterError`
        and `StoreError`.

        What is under way goes on, and is waited for.
        """
        await self._course(adapter).keep_loaded()

    async def discard(self, adapter: str) -> None:
        """Throw away what `adapter` has learned since its current version."""
        async with self.held(adapter):
            pass

    async def make_room(self) -> None:
        """Free the memory of trainers that nobody trains just now, and of the others after their
        turn: somebody has none. Adapters then take turns with it."""
        self._crowded_s = time.monotonic()
        for course in list(self._courses.values()):
            await course.free()

    async def count(self) -> None:
        """Show the samples by state as metrics, and wake whoever has some to learn from."""
        counted = await self._tools.store.read(_counted)
        for adapter, splits in counted.items():
            for split in Split:
                states = splits.get(split, {})
                for state in SampleState:
                    gauge = self._tools.metrics.samples.labels(adapter, split.value, state.value)
                    gauge.set(states.get(state, 0))
            if splits.get(Split.TRAIN, {}).get(SampleState.ACCEPTED):
                self.notify(adapter)

    def _course(self, adapter: str) -> Course:
        if adapter not in self._courses:
            self._courses[adapter] = Course(adapter, self._tools)
        return self._courses[adapter]

    async def _watch(self) -> None:
        while True:
            try:
                await self.count()
            except Exception as error:  # or nobody would look again
                logger.warning("cannot look for new samples: %s", error)
            await asyncio.sleep(_POLL_S)

    async def _teach(self, adapter: str) -> None:
        """Turns until nothing came for a while; then the trainer's memory is freed."""
        course, wake, troubles = self._course(adapter), self._wake[adapter], _Troubles()
        try:
            while True:
                wake.clear()
                try:
                    progress = await course.turn(self._slots)
                    if progress is Progress.LEARNED:  # not if there was nothing to fail
                        troubles = _Troubles()
                    if time.monotonic() - self._crowded_s < _MAKE_ROOM_S:
                        await course.free()
                        await asyncio.sleep(_MAKE_ROOM_S)
                except Exception as error:
                    await self._outlast(adapter, error, troubles)
                    continue
                if progress is Progress.SOON:
                    await asyncio.sleep(_SOON_S)
                elif progress is Progress.IDLE and not await _woken(wake):
                    await course.rest()
                    if not wake.is_set():
                        return
        finally:
            del self._tasks[adapter]

    async def _outlast(self, adapter: str, error: Exception, troubles: _Troubles) -> None:
        """Say what stopped a turn, once, and wait until the next one may succeed."""
        waits = f"learning waits: {error}"
        match error:
            case NoMemory():
                if troubles.new("no memory"):
                    await self._tell(adapter, "info", waits)
                await self.make_room()
                await asyncio.sleep(_LOOK_FOR_ROOM_S)
            case NoRoom():
                if troubles.new(str(error)):
                    await self._tell(adapter, "warning", waits)
                await asyncio.sleep(_LOOK_FOR_ROOM_S)
            case DiskError() | OSError():
                if troubles.new("no disk"):
                    await self._tell(adapter, "error", waits)
                await troubles.disk.wait()
            case EngineDead():  # these samples may have killed it
                await troubles.others.wait()
                await engine_ready(self._tools.client)
            case TrainingCancelled():
                pass
            case _:
                if troubles.new(str(error)):
                    await self._failed(adapter, error)
                await troubles.others.wait()

    async def _failed(self, adapter: str, error: Exception) -> None:
        """Say it in the adapter's history, and so in the log; a fault of ours with its trace."""
        if not isinstance(error, TandemError):
            logger.error("learning of %s failed", adapter, exc_info=error)
        await self._tell(adapter, "error", f"learning failed: {error}")

    async def _tell(self, adapter: str, level: str, message: str) -> None:
        try:
            await self._tools.tell(adapter, level, message)
        except TandemError as unwritten:
            logger.error("cannot keep an event of %s (%s): %s", adapter, unwritten, message)


def _counted(connection: Connection) -> dict[str, dict[Split, dict[SampleState, int]]]:
    """Samples of all adapters, also of those that have none (any more)."""
    counted = samples.counts(connection)
    return {record.name: counted.get(record.name, {}) for record in adapters.listed(connection)}


async def _woken(wake: asyncio.Event) -> bool:
    # Not `wait_for`: before Python 3.12 it swallows a cancellation that comes together with the
    # event, and `stop` would wait for the time to run out.
    try:
        async with asyncio.timeout(_REST_AFTER_S):
            await wake.wait()
    except TimeoutError:
        return False
    return True
