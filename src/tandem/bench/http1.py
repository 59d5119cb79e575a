"""A small HTTP/1.1 client for streamed answers: bytes in, body out, with little Python.

The load generator shares its cores with the server that it measures, so an event must cost only
microseconds. One connection per request, `Connection: close`. Knows nothing about JSON or events.
Invariant: `on_body` gets the decoded body in order, and `done` is set exactly once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem.core.errors import InvalidRequest

MAX_HEAD_BYTES = 64 * 1024


class ProtocolError(Exception):
    """The server's answer is not HTTP/1.1 as this client understands it, or was cut short."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is. `prefix` is the path before `/v1/...` (usually empty)."""

    host: str
    port: int
    tls: bool
    prefix: str

    @staticmethod
    def parse(url: str) -> Origin:
        """From `http://host:port` or `host:port`, with or without a trailing `/v1`."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https"):
            raise InvalidRequest(f"{url!r} is not a server's address; write http://HOST:PORT")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return Origin(host, port or (443 if tls else 80), tls, prefix)

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """The bytes of one request."""
        fields = {
            "Host": f"{self.host}:{self.port}",
            "Connection": "close",
            "Content-Length": str(len(body)),
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {self.prefix}{path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Exchange(asyncio.Protocol):
    """One request and its answer.

    `on_body(data)` gets decoded body bytes as they come. `done` is set when the body is complete;
    otherwise it gets a `ProtocolError` or the transport's error. `status` is 0 until the head was
    read.
    """

    def __init__(self, request: bytes, on_body: Callable[[bytes], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_body = on_body
        self._buffer = bytearray()
        self._decode: Callable[[], None] = self._head
        self._left = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Decode the received bytes."""
        self._buffer += data
        try:
            self._decode()
        except Exception as error:
            self._finish(error)

    def eof_received(self) -> None:
        """The server closed its side, which ends a body without a length."""
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Anything still expected is lost."""
        self._ended(exc)

    def close(self) -> None:
        """Drop the connection at once, like a client that leaves."""
        self.done.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _ended(self, error: Exception | None) -> None:
        if self._decode == self._until_close and error is None:
            self._finish(None)
        else:
            self._finish(error or ProtocolError("the connection closed before the answer ended"))

    def _finish(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        if self._transport is not None:
            self._transport.close()

    def _head(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ProtocolError("the answer's head is too long")
            return
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ProtocolError(f"not an HTTP/1.1 answer: {first[:60]!r}")
        status = int(rest[:3])
        if 100 <= status < 200:
            self._head()
            return
        self.status = status
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._choose_body()
        self._decode()

    def _choose_body(self) -> None:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._decode = self._chunk_size
        elif "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
            self._decode = self._counted
        else:
            self._decode = self._until_close

    def _counted(self) -> None:
        self._take(min(self._left, len(self._buffer)))
        if self._left == 0:
            self._finish(None)

    def _until_close(self) -> None:
        self._left = len(self._buffer)
        self._take(self._left)

    def _take(self, size: int) -> None:
        if size:
            data = bytes(self._buffer[:size])
            del self._buffer[:size]
            self._left -= size
            self._on_body(data)

    def _chunk_size(self) -> None:
        """Decode all complete chunks in the buffer; passes their content on in one piece."""
        body = bytearray()
        buffer, at, ended = self._buffer, 0, False
        while True:
            line_end = buffer.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(bytes(buffer[at:line_end]).partition(b";")[0], 16)
            start = line_end + 2
            if size == 0:
                ended = True
                break
            if len(buffer) < start + size + 2:
                break
            body += buffer[start : start + size]
            at = start + size + 2
        del buffer[:at]
        if body:
            self._on_body(bytes(body))
        if ended:
            self._finish(None)


async def connect(origin: Origin, exchange: Exchange) -> None:
    """Open a connection for `exchange`, which then runs on its own. Raises `OSError`."""
    context = ssl.create_default_context() if origin.tls else None
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: exchange, origin.host, origin.port, ssl=context)


async def fetch(
    origin: Origin, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> tuple[int, bytes]:
    """One whole answer: status and body. Raises `OSError` or `ProtocolError`."""
    received = bytearray()
    exchange = Exchange(origin.request(method, path, headers, body), received.extend)
    await connect(origin, exchange)
    await exchange.done
    return exchange.status, bytes(received)
