"""HTTP/1.1 as uvicorn speaks it, without delay, for clients that do not keep their part of it.

uvicorn waits for ever for the head of a request, for a body that nobody reads any more, and for a
client that does not take its answer. Here each has a time, then the connection ends. The time of a
body that somebody reads is `Bodies`' matter. Invariant: a connection that gets nowhere is closed.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """One connection; `patience_s` for a head, for the rest of a refused body, and for an answer
    that is not read on."""

    patience_s = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owed: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The head of a request should follow.

        asyncio leaves the sockets of our listener as they are: the body of an answer would wait
        until the client acknowledges the head, which takes it 40 ms.
        """
        super().connection_made(transport)
        self._expect(True)
        connection = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):  # else a Unix socket
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is expected any more."""
        super().connection_lost(exc)
        self._expect(False)
        _stop(self._unread)
        self._unread = None

    def data_received(self, data: bytes) -> None:
        """Take it; what is still missing has the time that it had."""
        super().data_received(data)
        self._expect(self.conn.their_state is h11.IDLE or self._refused())

    def on_response_complete(self) -> None:
        """The next head has the time of an idle connection; the rest of a body has ours."""
        super().on_response_complete()
        self._expect(self._refused())

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent."""
        super().pause_writing()
        if self._unread is None:
            self._watch()

    def resume_writing(self) -> None:
        """It has read on."""
        super().resume_writing()
        _stop(self._unread)
        self._unread = None

    def _watch(self) -> None:
        """Wait for it to read on; a long answer is one write, of which any part counts."""
        self._unread = self.loop.call_later(
            self.patience_s, self._look, self.transport.get_write_buffer_size()
        )

    def _look(self, unsent_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_bytes:
            self._watch()
        else:
            self.transport.abort()

    def _refused(self) -> bool:
        """Whether a body still comes though its answer was sent."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.conn.their_state is h11.SEND_BODY

    def _expect(self, owing: bool) -> None:
        if not owing:
            _stop(self._owed)
            self._owed = None
        elif self._owed is None and not self.transport.is_closing():
            self._owed = self.loop.call_later(self.patience_s, self.transport.abort)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
