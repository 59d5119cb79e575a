"""Work that has to come to its end once it has begun, although nobody waits for it any more.

Between a rename, a commit and the engine's adoption there is no good place to stop. Knows nothing
of that work. Invariant: the caller goes on only after the work has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work` to its end. Raises what it raises; `CancelledError`, after that end, if the caller
    was cancelled meanwhile."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and (problem := task.exception()) is not None:
        logger.warning("what was under way failed: %s", problem)
    raise cancelled
