"""Requests without a connection: the lines of batches, answered as their routes answer.

Turns a body into the service's options and the answer into JSON, with the routes' own functions.
Invariant: what a route refuses with 4xx is refused here with the same status and body.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from tandem.api.errors import failure
from tandem.api.generation import (
    chat_options,
    completion_options,
    require_storable,
    wants_of,
)
from tandem.api.render import ChatShape, CompletionShape, Shape, WholeAnswer
from tandem.api.respond import Wants, header_of
from tandem.api.schemas import ChatRequest, CompletionRequest, SamplingFields, parse
from tandem.core.batches import BatchRecord
from tandem.core.errors import InvalidRequest, TandemError
from tandem.core.slo import WorkClass
from tandem.services.answering.answer import Answer
from tandem.services.answering.generation import Generation, Options
from tandem.services.answering.models import Models, Pin
from tandem.services.answering.receipts import Receipts
from tandem.services.auth import Caller
from tandem.services.batches.reply import Reply

_CHECKED_IN_THREAD_BYTES = 64 * 1024
Asked = TypeVar("Asked", bound=SamplingFields)


@dataclass(frozen=True, slots=True)
class _Line:
    """What a batch says of its lines."""

    batch: str
    pinned: Pin | None


class Lines:
    """See `tandem.services.batches.reply.Respond`."""

    def __init__(self, generation: Generation, models: Models, receipts: Receipts) -> None:
        self._generation = generation
        self._models = models
        self._receipts = receipts

    async def __call__(
        self, batch: BatchRecord, body: bytes, caller: Caller, pinned: Pin | None
    ) -> Reply:
        """The reply to a body."""
        how = _Line(batch.batch_id, pinned)
        try:
            if batch.endpoint.endswith("/chat/completions"):
                return await self._chat(body, caller, how)
            return await self._complete(body, caller, how)
        except TandemError as error:
            told = failure(error)
            if not 400 <= told.status < 500 or told.status == 429:
                raise
            return Reply(told.status, told.body)

    async def _chat(self, raw: bytes, caller: Caller, how: _Line) -> Reply:
        body = await _parsed(ChatRequest, raw)
        await self._allow(body, caller)
        options = _offline(chat_options(body, caller), how, store=body.store)
        wants = wants_of(body, logprobs=bool(body.logprobs))
        turns = [message.rendered() for message in body.messages]
        answer = await self._generation.chat(turns, options)
        return await self._whole(answer, ChatShape(), wants)

    async def _complete(self, raw: bytes, caller: Caller, how: _Line) -> Reply:
        body = await _parsed(CompletionRequest, raw)
        await self._allow(body, caller)
        options = _offline(completion_options(body, caller), how, store=body.store)
        wants = wants_of(body, logprobs=body.logprobs is not None)
        answer = await self._generation.complete(body.prompt, options)
        return await self._whole(answer, CompletionShape(), wants)

    async def _allow(self, body: SamplingFields, caller: Caller) -> None:
        caller.require_serve((await self._models.resolve(body.model, caller)).name)
        require_storable(body, self._receipts)

    async def _whole(self, answer: Answer, shape: Shape, wants: Wants) -> Reply:
        whole = WholeAnswer(shape, wants.extras)
        async with aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                whole.add(delta)
        header = header_of(self._models, answer, wants, int(time.time()))
        usage = answer.usage
        return Reply(
            200,
            msgspec.Raw(whole.encode(header, usage)),
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
        )


async def _parsed(kind: type[Asked], raw: bytes) -> Asked:
    if len(raw) < _CHECKED_IN_THREAD_BYTES:
        body = parse(kind, raw)
    else:
        body = await asyncio.to_thread(parse, kind, raw)
    if body.stream:
        raise InvalidRequest("lines of a batch are not streamed", param="stream")
    return body


def _offline(options: Options, how: _Line, *, store: bool | None) -> Options:
    """Nobody waits for a line, and nobody rates it unless its client says so (`store`)."""
    return replace(
        options,
        work_class=WorkClass.OFFLINE,
        pinned=how.pinned,
        batch=how.batch,
        receipt=store is True,
    )
