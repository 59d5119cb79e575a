"""The seam between a client and its host, which runs in another process or a thread.

A transport starts the host, carries messages, and reports when the host is gone. It does not know
what messages mean to the client. Invariant: messages of one host arrive in the order in which it
sent them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tandem.engine.messages import Command, Message


class Transport(Protocol):
    """Starts a host and carries commands to it and messages back.

    `deliver` is called in the event loop that called `start`. A transport that restarts its host
    delivers `Lost`, then `Ready` with a higher incarnation.
    """

    async def start(self, deliver: Callable[[Message], None]) -> None:
        """Start the host. Returns at once; `Ready` or `Broken` follow."""
        ...

    def send(self, command: Command) -> None:
        """Pass on a command, in order. It is dropped if the host is gone."""
        ...

    async def close(self) -> None:
        """End the host."""
        ...
