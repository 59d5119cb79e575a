"""The version that answers all lines of a batch, loaded under a name of the batch's own.

Knows one batch's version; which one that is, the batch says. Invariant: no other version answers a
batch that has one, and none stays loaded for a batch that is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem.adapters.files import holds
from tandem.core.batches import BatchRecord
from tandem.core.errors import AdapterError, TandemError
from tandem.core.ports import EngineState
from tandem.core.version import PINNED, AdapterVersion
from tandem.services.answering.models import Pin
from tandem.services.batches.tools import BatchTools
from tandem.services.tasks import Backoff
from tandem.store import adapters

logger = logging.getLogger(__name__)


class VersionGone(TandemError):
    """The files of a batch's version are gone, or are not what they were."""


async def pin_of(
    batch: BatchRecord, tools: BatchTools, over: Callable[[], Awaitable[bool]]
) -> Pin | None:
    """Load the version of a batch; tried until it is `over`. None if it has none.

    Raises `VersionGone`, and what `over` raises.
    """
    if batch.adapter is None or batch.version is None:
        return None
    if batch.version == 0:
        return Pin(None)
    backoff = Backoff()
    while not await over():
        record = await tools.store.read(adapters.version, batch.adapter, batch.version)
        which = f"version {batch.version} of '{batch.adapter}'"
        if record is None:
            raise VersionGone(f"{which} is gone, which answers this batch")
        name = f"{PINNED}{batch.batch_id}"
        loaded = AdapterVersion(name, record.number, record.content_hash, record.path)
        try:
            if tools.client.state is EngineState.READY:
                return Pin(await tools.client.publish_adapter(loaded))
        except TandemError as error:
            kept = await asyncio.to_thread(holds, record.path, record.content_hash)
            if isinstance(error, AdapterError) and not kept:
                raise VersionGone(f"the files of {which} are gone or have changed") from error
            logger.warning("%s waits for %s: %s", batch.batch_id, which, error)
        await backoff.wait()
    return None


async def unpin(pin: Pin | None, tools: BatchTools) -> None:
    """Unload it."""
    if pin is None or pin.version is None:
        return
    try:
        await tools.client.unload_adapter(pin.version.name)
    except TandemError as error:
        logger.debug("%s was not loaded any more: %s", pin.version.name, error)
