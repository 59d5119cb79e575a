"""Runs a host in a thread of this process: for tests and for use without a server.

The same host and messages as between processes, without encoding. There is no supervision: an
engine that dies in this process takes the process with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from tandem.engine.channel import QueueChannel
from tandem.engine.host import Host, MakeLoop
from tandem.engine.messages import Broken, Command, Loading, Message, Stop, failure_of


class ThreadTransport:
    """See `tandem.engine.client.Transport`."""

    def __init__(self, make_loop: MakeLoop) -> None:
        self._make_loop = make_loop
        self._channel: QueueChannel | None = None
        self._thread: threading.Thread | None = None

    async def start(self, deliver: Callable[[Message], None]) -> None:
        """See `Transport`."""
        events = asyncio.get_running_loop()

        def pass_on(message: Message) -> None:
            if not events.is_closed():
                events.call_soon_threadsafe(deliver, message)

        self._channel = QueueChannel(pass_on)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """See `Transport`."""
        assert self._channel is not None
        self._channel.put(command)

    async def close(self) -> None:
        """See `Transport`."""
        if self._thread is not None and self._channel is not None:
            self._channel.put(Stop())
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        assert self._channel is not None
        channel = self._channel
        try:
            loop = self._make_loop(lambda stage, done: channel.send(Loading(0, stage, done)))
            Host(loop, channel, incarnation=0).run()
        except Exception as error:
            channel.send(Broken(0, failure_of(error)))
