"""An answer of the services as an HTTP response, whole or as a stream, in any dialect.

Knows what becomes of errors and of clients that wait, not what is written: that is the dialect's.
Invariant: an error before the first token has an HTTP status of its own; a later one is an event
in the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from fastapi import Response

from tandem.api import connection
from tandem.api.connection import EventStream
from tandem.api.errors import Failure, failure
from tandem.api.render import NOTHING_MORE, Extras, Header
from tandem.api.surface import Surface
from tandem.core.errors import TandemError
from tandem.services.answering.answer import Answer, Usage
from tandem.services.answering.choice import Delta
from tandem.services.answering.models import Models

ADAPTER_HEADER = "x-tandem-adapter"
_log = logging.getLogger(__name__)


class Whole(Protocol):
    """Gathers an answer into one body."""

    def add(self, delta: Delta) -> None:
        """Add what one choice gained."""
        ...

    def encode(self, header: Header, usage: Usage) -> bytes:
        """The body."""
        ...


class Streamed(Protocol):
    """Writes an answer as server-sent events, all that are due at once."""

    def delta(self, header: Header, delta: Delta, usage: Usage) -> bytes:
        """The events of one delta; nothing if it would tell the client nothing."""
        ...

    def end(self, header: Header, usage: Usage) -> bytes:
        """The events after the last delta."""
        ...

    def failed(self, told: Failure) -> bytes:
        """The events of an answer that cannot go on, the last ones of its stream."""
        ...


class Dialect(Protocol):
    """The shapes of one route."""

    def whole(self) -> Whole:
        """For one answer."""
        ...

    def stream(self) -> Streamed:
        """For one answer."""
        ...


@dataclass(frozen=True, slots=True)
class Wants:
    """How the client wants its answer; `n` choices for each prompt. `tier` is to be told."""

    stream: bool
    n: int = 1
    extras: Extras = NOTHING_MORE
    tier: str = ""


@dataclass(slots=True)
class _Opening:
    """Whether the head of a stream was sent before its first event: errors are events then."""

    sent: bool = False


async def respond(surface: Surface, answer: Answer, dialect: Dialect, wants: Wants) -> Response:
    """Wait for the first token (the adapter's version is known then), or for all of them."""
    created_s = int(time.time())
    if wants.stream:
        return await _stream(surface, answer, dialect, wants, created_s)
    whole = dialect.whole()
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            whole.add(delta)
    body = whole.encode(header_of(surface.models, answer, wants, created_s), answer.usage)
    headers = {ADAPTER_HEADER: answer.adapter}
    return Response(body, media_type="application/json", headers=headers)


async def _stream(
    surface: Surface, answer: Answer, dialect: Dialect, wants: Wants, created_s: int
) -> Response:
    """The stream, once its first event is there or has let itself be waited for too long."""
    opening = _Opening()
    chunks = _chunks(surface, answer, dialect, wants, opening, created_s)
    first = asyncio.ensure_future(anext(chunks))
    try:
        await asyncio.wait((first,), timeout=connection.QUIET_S)
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await chunks.aclose()
        raise
    if not first.done():
        opening.sent = True
        return EventStream(first, chunks, {})
    first.result()
    return EventStream(first, chunks, {ADAPTER_HEADER: answer.adapter})


async def _chunks(
    surface: Surface,
    answer: Answer,
    dialect: Dialect,
    wants: Wants,
    opening: _Opening,
    created_s: int,
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer; fails only before the first of them."""
    written = dialect.stream()
    header: Header | None = None
    told = False
    try:
        async with aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                if header is None:
                    header = header_of(surface.models, answer, wants, created_s)
                if chunk := written.delta(header, delta, answer.usage):
                    told = True
                    yield chunk
        assert header is not None
        if chunk := written.end(header, answer.usage):
            yield chunk
    except Exception as error:
        if not told and not opening.sent:
            raise
        if not isinstance(error, TandemError):
            _log.error("a stream failed", exc_info=error)
        yield written.failed(failure(error))


def header_of(models: Models, answer: Answer, wants: Wants, created_s: int) -> Header:
    """What every part of an answer says of itself."""
    fingerprint = models.fingerprint(answer.adapter)
    prompts = answer.prompts if wants.extras.token_ids else ()
    return Header(answer.id, created_s, answer.model.id, fingerprint, prompts, wants.n, wants.tier)
