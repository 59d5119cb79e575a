"""The reply to one line, however often that takes.

Knows which errors are not a line's fault. Invariant: every line has a reply in the end, unless its
batch ends before.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import AbstractAsyncContextManager, nullcontext

from tandem.core.batches import BatchRecord
from tandem.core.errors import (
    EngineDead,
    NotFound,
    OutOfMemory,
    Overloaded,
    StoreError,
    TandemError,
)
from tandem.services.answering.models import Pin
from tandem.services.auth import Caller
from tandem.services.batches.reply import Reply
from tandem.services.batches.tools import BatchTools
from tandem.services.learning.publish import engine_ready
from tandem.services.tasks import Backoff

logger = logging.getLogger(__name__)

_TRIES, _DEATHS = 3, 10
# After so many deaths of the engine under it, a line is sent beside few such lines, then beside
# none: the one that kills the engine has ever fewer others with it.
_SUSPECTED, _ALONE = 2, 5


async def reply_to(
    body: bytes, batch: BatchRecord, caller: Caller, tools: BatchTools, pin: Pin | None
) -> Reply:
    """What is not the line's fault is tried again: for ever where the server is at fault, a few
    times where it may be the line after all."""
    backoff, met = Backoff(), Counter[type[Exception]]()
    while True:
        try:
            async with _beside(met[EngineDead], tools):
                await engine_ready(tools.client)
                reply = await tools.respond(batch, body, caller, pin)
            if reply.status != 404 or pin is None or pin.version is None or met[NotFound]:
                return reply
            met[NotFound] += 1  # was it the pinned version that is not there?
            await tools.client.publish_adapter(pin.version)
            continue
        except Exception as error:
            met[type(error)] += 1
            if met[type(error)] == _most_tries(error):
                logger.warning("a line of %s fails", batch.batch_id, exc_info=error)
                return _failed(error)
            logger.debug("a line of %s waits: %s", batch.batch_id, error)
        await backoff.wait()


def _beside(deaths: int, tools: BatchTools) -> AbstractAsyncContextManager[None]:
    """Held while a line is answered under which the engine has died so often."""
    if deaths >= _ALONE:
        return tools.alone
    return tools.few if deaths >= _SUSPECTED else nullcontext()


def _most_tries(error: Exception) -> int | None:
    """How often a line may meet an error (None: for ever)."""
    match error:
        case Overloaded() | StoreError():
            return None  # never the line's fault
        case EngineDead() | OutOfMemory():
            return _DEATHS  # seldom: most lines are there by chance
        case _:
            return _TRIES


def _failed(error: Exception) -> Reply:
    told = str(error) if isinstance(error, TandemError) else "internal error; see the server's log"
    kind = "server_error"
    body = {"message": told, "type": kind, "param": None, "code": "generation_failed"}
    return Reply(500, {"error": body})
