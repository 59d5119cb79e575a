"""What happens on the connection beside the answer: reading a bounded body, noticing a leave, plain
JSON.

Invariant: work for a client ends as soon as its connection does, streamed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tandem.api.bodies import Bodies
from tandem.api.errors import CLIENT_CLOSED_REQUEST, BodyTooLarge
from tandem.api.schemas import Parsed, parse
from tandem.services.auth import Caller

QUIET_S = 10.0
COMMENT = b": waiting\n\n"
_LINGER_BYTES = 64 * 1024 * 1024


async def read(kind: type[Parsed], request: Request, bodies: Bodies) -> Parsed:
    """The checked body; an empty one has no fields. Raises as `read_body` and `parse` do."""
    raw = await read_body(request, bodies.max_body_bytes) or b"{}"
    return await bodies.check(raw, partial(parse, kind, raw))


def who_asks(request: Request) -> Caller:
    """Whose key the request has shown."""
    caller: Caller = request.state.caller
    return caller


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises `BodyTooLarge` if it exceeds the limit.

    What exceeds it is read and forgotten within reason: a client whose connection is closed while
    it still sends sees a reset instead of the answer.
    """
    body = bytearray()
    size_bytes = 0
    async for part in request.stream():
        size_bytes += len(part)
        if size_bytes <= limit_bytes:
            body += part
        elif size_bytes > limit_bytes + _LINGER_BYTES:
            break
    if size_bytes > limit_bytes:
        raise BodyTooLarge(
            f"the request body has more than {limit_bytes} bytes; send less (--max-body)"
        )
    return bytes(body)


def as_json(body: dict[str, Any], status: int = 200) -> Response:
    """A response whose body is JSON."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


async def until_disconnect(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The result of `work`, which is cancelled when the client leaves."""
    task = asyncio.create_task(work)
    leave = asyncio.create_task(_left(request.receive))
    try:
        await asyncio.wait((task, leave), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        await _cancel(task, leave)


class EventStream(Response):
    """Server-sent events: `first`, then each item of `rest` as it comes; where nothing comes for
    `QUIET_S`, a comment, so that nobody on the way takes the connection for dead.

    `rest` must have been started (for `first`), so that closing it runs its clean-up. It is closed
    when it ends and when the client leaves, whichever is first.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Task[bytes],
        rest: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when `receive` tells that the client has gone."""
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        sender = asyncio.create_task(self._send(send, head))
        comments = asyncio.create_task(self._comment(send))
        leave = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sender, leave), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            await _cancel(sender, comments, leave, self._first)
            await self._rest.aclose()

    async def _send(self, send: Send, head: Message) -> None:
        await send(head)
        if not self._first.done():
            await self._write(send, COMMENT)
        await self._write(send, await self._first)
        async for event in self._rest:
            await self._write(send, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        self._sent_s = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _comment(self, send: Send) -> None:
        """A comment whenever nothing was sent for so long."""
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        while True:
            await asyncio.sleep(max(0.0, self._sent_s + QUIET_S - loop.time()))
            if loop.time() - self._sent_s >= QUIET_S:
                await self._write(send, COMMENT)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
