"""What happens on the connection beside the answer: reading a bounded body, noticing a leave.

Large bodies are checked beside the event loop. Invariant: work for a client ends as soon as its
connection does, streamed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.api.errors import CLIENT_CLOSED_REQUEST, BodyTooLarge
from tandem.api.schemas import Parsed, parse

_LINGER_BYTES = 64 * 1024 * 1024
_CHECKED_IN_THREAD_BYTES = 64 * 1024
Result = TypeVar("Result")


async def read(kind: type[Parsed], request: Request, limit_bytes: int) -> Parsed:
    """The checked body; an empty one has no fields. Raises as `read_body` and `parse` do."""
    raw = await read_body(request, limit_bytes) or b"{}"
    return await beside(raw, partial(parse, kind, raw))


async def beside(raw: bytes, work: Callable[[], Result]) -> Result:
    """The result of `work` on a body, which runs beside the event loop if the body is large."""
    return work() if len(raw) < _CHECKED_IN_THREAD_BYTES else await asyncio.to_thread(work)


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
    """Server-sent events: `first`, then each item of `rest` as it comes.

    `rest` must have been started (it yielded `first`), so that closing it runs its clean-up. It
    is closed when it ends and when the client leaves, whichever is first.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: AsyncGenerator[bytes, None], headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when `receive` tells that the client has gone."""
        sender = asyncio.create_task(self._send(send))
        leave = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sender, leave), return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            await _cancel(sender, leave)
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
