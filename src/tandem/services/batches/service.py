"""Use cases of batches: make one, look it up, cancel it; and the tasks that work on them.

Knows neither HTTP nor the routes that lines are for. Invariant: a batch that was acknowledged is
worked on until it has ended, by this start or the next one.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.core.batches import BatchRecord, BatchStatus
from tandem.core.errors import (
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    StoreError,
    WrongStatus,
)
from tandem.services.auth import Caller
from tandem.services.batches.run import BatchRun
from tandem.services.batches.tools import BatchTools
from tandem.services.tasks import Backoff
from tandem.store import Connection, files
from tandem.store import batches as rows

logger = logging.getLogger(__name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
PURPOSE = "batch"
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mhd])")
_SECONDS = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
_MOST_WINDOW_S = 30 * 86_400.0
_MOST_OPEN = 100  # of one key, that have not ended
_RETRY_S = 60.0
_CLEARED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class BatchAsk:
    """What a client asks for; `output_kept_s` as in `BatchRecord`. `newest`: each line is answered
    by the version of its adapter that is current then."""

    input_file: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, Any] | None = None
    output_kept_s: float | None = None
    newest: bool = False


class Batches:
    """All batches of one server. `start` and `stop` run in the server's event loop."""

    def __init__(self, tools: BatchTools) -> None:
        self._tools = tools
        self._store = tools.store
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Go on with the batches that have not ended, and clear up behind those that have.
        Nothing is kept before."""
        await self._tools.passed.time_s()
        for batch_id in await self._store.read(rows.unfinished):
            self._launch(batch_id)
        for batch_id in await self._store.read(rows.uncleared):
            self._launch(batch_id)

    async def stop(self) -> None:
        """Stop working; what is under way is done again by the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, ask: BatchAsk, caller: Caller) -> BatchRecord:
        """Make a batch, which is validated next.

        Raises `InvalidRequest`, `NotFound`, and `QuotaExceeded` where too many have not ended.
        """
        if ask.endpoint not in ENDPOINTS:
            known = " or ".join(ENDPOINTS)
            raise InvalidRequest(
                f"'endpoint' must be {known}, not '{ask.endpoint[:100]}'", param="endpoint"
            )
        window_s = _window_s(ask.completion_window)
        file = await self._tools.files.find(ask.input_file, caller.tenant, "input_file_id")
        if file.purpose != PURPOSE:
            raise InvalidRequest(
                f"the file '{file.file_id}' was uploaded with purpose={file.purpose}; upload it "
                f"with purpose={PURPOSE}",
                param="input_file_id",
            )
        if file.num_bytes > self._tools.most_file_bytes:
            raise InvalidRequest(
                f"the file has {file.num_bytes} bytes; a batch has at most "
                f"{self._tools.most_file_bytes} (--max-batch-file)",
                param="input_file_id",
            )
        now_s = self._tools.now()
        batch = BatchRecord(
            batch_id=f"batch_{uuid.uuid4().hex[:24]}",
            created_s=now_s,
            tenant=caller.tenant,
            endpoint=ask.endpoint,
            input_file=file.file_id,
            completion_window=ask.completion_window,
            expires_s=now_s + window_s,
            pinned=not ask.newest,
            output_kept_s=ask.output_kept_s,
            metadata=dict(ask.metadata or {}),
        )
        try:
            await self._store.write(_add, batch)
        except StoreError:  # nobody knows whether it is kept; its work will see
            self._launch(batch.batch_id)
            raise
        self._launch(batch.batch_id)
        return batch

    async def find(self, batch_id: str, tenant: str, param: str = "batch_id") -> BatchRecord:
        """One batch of a tenant. Raises `NotFound`."""
        batch = await self._store.read(rows.find, batch_id)
        if batch is None or batch.tenant != tenant:
            raise NotFound(f"there is no batch '{batch_id[:100]}'", param=param)
        return batch

    async def listed(self, tenant: str, after: str | None, limit: int) -> list[BatchRecord]:
        """Batches of a tenant, newest first, those older than batch `after`. Raises `NotFound`."""
        if after is not None:
            await self.find(after, tenant, "after")
        return await self._store.read(rows.listed, tenant, after=after, limit=limit)

    async def cancel(self, batch_id: str, tenant: str) -> BatchRecord:
        """Give a batch up; what was answered is kept. One whose files are being written ends as it
        would have. Raises `NotFound`, and `WrongStatus` if it has ended."""
        await self.find(batch_id, tenant)
        batch = await self._store.write(rows.cancel, batch_id, self._tools.now())
        assert batch is not None
        if batch.status.ended:
            raise WrongStatus(
                f"batch '{batch_id}' is {batch.status.value} and cannot be cancelled any more"
            )
        if batch.status is BatchStatus.CANCELLING and (run := self._runs.get(batch_id)):
            run.cancelling.set()
        return batch

    def _launch(self, batch_id: str) -> None:
        task = asyncio.create_task(self._work(batch_id), name=batch_id)
        self._tasks[batch_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch_id, None))

    async def _work(self, batch_id: str) -> None:
        """Until the batch has ended; an error of ours is told, and the work begun again."""
        backoff = Backoff()
        while True:
            try:
                batch = await self._store.write(rows.claim, batch_id)
                if batch is not None:
                    run = self._runs[batch_id] = BatchRun(batch, self._tools)
                    await run.run()
                while not await self._store.write(rows.cleared, batch_id, _CLEARED_AT_ONCE):
                    pass
                return
            except rows.Superseded as error:
                logger.warning("%s", error)
                return
            except (StoreError, OSError) as error:
                logger.error("batch %s waits: %s", batch_id, error)
            except Exception as error:
                logger.error("batch %s failed and is begun again", batch_id, exc_info=error)
            finally:
                self._runs.pop(batch_id, None)
            await backoff.wait()


def _add(connection: Connection, batch: BatchRecord) -> None:
    if rows.num_open(connection, batch.tenant) >= _MOST_OPEN:
        raise QuotaExceeded(
            f"{_MOST_OPEN} batches of this API key have not ended; wait for one, or cancel it",
            retry_after_s=_RETRY_S,
        )
    if files.find(connection, batch.input_file) is None:
        raise NotFound(f"there is no file '{batch.input_file}'", param="input_file_id")
    rows.add(connection, batch)


def _window_s(text: str) -> float:
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0.0 < seconds <= _MOST_WINDOW_S:
        raise InvalidRequest(
            f"'completion_window' must be a time of up to 30 days such as 24h, 90m or 7d, not "
            f"'{text[:40]}'",
            param="completion_window",
        )
    return seconds
