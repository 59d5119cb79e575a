"""Runs a host in its own process, watches it, and starts another when it dies.

The child is a fresh interpreter (never a fork), reads its settings from standard input and ends
with this process. It counts as dead when it exits, when its heartbeat stops, or when an iteration
does not end. A short silence is first reported as `Quiet`. Invariant: at most one child lives.
`Lost` is delivered once per child, after its end, unless the child reported `Broken`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq.asyncio

from tandem.core.clock import Clock
from tandem.engine.channel import ZmqClientChannel
from tandem.engine.meeting import meeting_place
from tandem.engine.messages import (
    Broken,
    Command,
    Heartbeat,
    Loading,
    Lost,
    Message,
    Quiet,
    Ready,
)

logger = logging.getLogger(__name__)

# Heartbeats come four times a second from their own thread. A busy machine may delay them, so a
# late one is only reported; a long silence counts as death.
QUIET_S = 1.5
SILENCE_S = 10.0
# No iteration of a healthy engine takes this long: it is stuck, although heartbeats still come.
STUCK_S = 300.0
_POLL_S = 0.1
_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)


class Launch(msgspec.Struct, frozen=True):
    """What the child reads from standard input."""

    endpoint: str  # where to connect
    incarnation: int
    settings: bytes  # encoded
    parent: int  # process that it must not outlive


class ProcessTransport:
    """A `tandem.engine.transport.Transport` whose host runs in a child process. `command` starts a
    child that calls `host.serve`; `name` is what it is called in messages."""

    def __init__(
        self,
        command: Sequence[str],
        settings: bytes,
        clock: Clock,
        *,
        name: str = "engine",
        quiet_s: float = QUIET_S,
        silence_s: float = SILENCE_S,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._command = list(command)
        self._settings = settings
        self._clock = clock
        self._name = name
        self._quiet_s = quiet_s
        self._silence_s = silence_s
        self._stuck_s = stuck_s
        self._busy_s = 0.0
        self._deliver: Callable[[Message], None] | None = None
        self._incarnation = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._channel: ZmqClientChannel | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_s = 0.0
        self._quiet = False
        self._ready = False
        self._broken = False

    @property
    def pid(self) -> int | None:
        """Process id of the child, for watching it from outside."""
        return self._child.pid if self._child is not None else None

    async def start(self, deliver: Callable[[Message], None]) -> None:
        """Start supervising: the first child is started in the background."""
        self._deliver = deliver
        self._tasks = [asyncio.create_task(self._supervise(), name=f"{self._name} supervisor")]

    def send(self, command: Command) -> None:
        """Send a command to the child; dropped while there is none."""
        if self._channel is not None:
            self._channel.send(command)

    async def close(self) -> None:
        """End the child and stop supervising."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _supervise(self) -> None:
        failures = 0
        with meeting_place() as folder:
            while True:
                await self._live_once(folder)
                if self._broken and self._incarnation == 0:
                    return  # it never ran, and `Broken` reported the reason
                failures = 0 if self._ready else failures + 1
                self._incarnation += 1
                await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])

    async def _live_once(self, folder: Path) -> None:
        """Start a child and return when it is dead."""
        assert self._deliver is not None
        endpoint = f"ipc://{folder}/engine-{self._incarnation}"
        self._ready = self._broken = self._quiet = False
        self._busy_s = 0.0
        context = zmq.asyncio.Context()
        try:
            self._channel = ZmqClientChannel(context, endpoint)
        except zmq.ZMQError as error:  # there are too many open files, for one
            context.destroy(linger=0)
            reason = f"cannot reach the {self._name} process: {error}"
            logger.error("%s", reason)
            self._deliver(Lost(self._incarnation, reason))
            return
        reader = asyncio.create_task(self._read(self._channel))
        try:
            try:
                self._child = self._spawn(endpoint)
                reason = await self._watch(self._child, reader)
                # A client that hears of its death repairs what the child was writing, so it must
                # end first.
                await _end(self._child)
            except OSError as error:
                reason = f"cannot start the {self._name} process: {error}"
            if not self._broken:  # otherwise `Broken` reported the reason
                logger.error("%s", reason)
                self._deliver(Lost(self._incarnation, reason))
        finally:
            # A second cancellation ends this at its first `await`; by then all is closed.
            reader.cancel()
            self._channel.close()
            self._channel = None
            context.term()
            child, self._child = self._child, None
            await asyncio.gather(reader, _end(child), return_exceptions=True)

    def _spawn(self, endpoint: str) -> subprocess.Popen[bytes]:
        launch = Launch(endpoint, self._incarnation, self._settings, os.getpid())
        child = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            pipe.write(msgspec.msgpack.encode(launch))
        self._heard_s = self._clock.now()
        return child

    async def _watch(self, child: subprocess.Popen[bytes], reader: asyncio.Task[None]) -> str:
        """Return when the child counts as dead, with the reason."""
        looked_s = self._clock.now()
        while True:
            now = self._clock.now()
            if now - looked_s > 1.0:  # this process was paused, so it received nothing
                self._heard_s = now
            looked_s = now
            code = child.poll()
            if code is not None:
                await asyncio.sleep(0)  # its last messages may still be in the socket
                return f"the {self._name} process ended unexpectedly (exit status {code})"
            if reader.done():  # nobody would hear of it any more
                return f"a message of the {self._name} process failed: {reader.exception()}"
            self._tell_quiet(self._ready and now - self._heard_s > self._quiet_s)
            if self._ready and now - self._heard_s > self._silence_s:
                return f"the {self._name} process gave no sign of life for {self._silence_s:.0f} s"
            if self._busy_s > self._stuck_s:
                return f"an iteration of the {self._name} took longer than {self._stuck_s:.0f} s"
            await asyncio.sleep(_POLL_S)

    def _tell_quiet(self, quiet: bool) -> None:
        """Tell the client once that heartbeats have stopped for a while, or have come back."""
        assert self._deliver is not None
        if quiet != self._quiet:
            self._quiet = quiet
            self._deliver(Quiet(self._incarnation, quiet))

    async def _read(self, channel: ZmqClientChannel) -> None:
        assert self._deliver is not None
        while True:
            message = await channel.receive()
            self._heard_s = self._clock.now()
            self._tell_quiet(False)
            self._broken = self._broken or isinstance(message, Broken)
            if isinstance(message, Heartbeat):
                self._busy_s = message.busy_s
            else:
                self._deliver(message)
            self._ready = self._ready or isinstance(message, Ready)
            if isinstance(message, Loading):
                logger.debug("%s: %.0f%%", message.stage, 100 * message.fraction)


def _end(child: subprocess.Popen[bytes] | None) -> asyncio.Future[int | None]:
    """Kill the child at once, if there is one; done when it is gone. SIGKILL takes milliseconds."""
    if child is None:
        return asyncio.get_running_loop().run_in_executor(None, lambda: None)
    child.kill()
    return asyncio.get_running_loop().run_in_executor(None, child.wait)
