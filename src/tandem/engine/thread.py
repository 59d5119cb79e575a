"""Runs a host in a thread of this process: for tests and for use without a server.

It uses the same host and messages as between processes, without encoding. There is no supervision:
an engine that fails stays dead, and a crash in native code ends the whole process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from tandem.core.errors import TandemError
from tandem.engine.channel import QueueChannel
from tandem.engine.host import Host, MakeLoop, start_loop
from tandem.engine.messages import Command, Lost, Message, Stop

logger = logging.getLogger(__name__)


class ThreadTransport:
    """A `tandem.engine.transport.Transport` whose host runs in a thread."""

    def __init__(self, make_loop: MakeLoop) -> None:
        self._make_loop = make_loop
        self._channel: QueueChannel | None = None
        self._thread: threading.Thread | None = None

    async def start(self, deliver: Callable[[Message], None]) -> None:
        """Start the host's thread."""
        events = asyncio.get_running_loop()

        def pass_on(message: Message) -> None:
            if not events.is_closed():
                events.call_soon_threadsafe(deliver, message)

        self._channel = QueueChannel(pass_on)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """Queue a command for the host."""
        assert self._channel is not None
        self._channel.put(command)

    async def close(self) -> None:
        """Stop the host and wait for its thread."""
        if self._thread is not None and self._channel is not None:
            self._channel.put(Stop())
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        assert self._channel is not None
        channel = self._channel
        try:
            loop = start_loop(self._make_loop, channel, 0)
        except TandemError:
            return  # `Broken` reported the reason
        except Exception:
            logger.exception("the engine cannot start")
            return
        try:
            Host(loop, channel, incarnation=0).run()
        except Exception as error:
            logger.exception("the engine failed")
            channel.send(Lost(0, f"the engine failed: {error}"))
