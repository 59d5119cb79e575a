"""One batch from its file to its end: validate, answer line by line, write the files.

Each result is committed before it counts, so a server that starts again goes on with the lines that
have none. Knows one batch; who works on which is the service's. Invariant: at the end every line
has one result, which stands in one of the two files.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.batches import BatchError, BatchRecord, BatchStatus, LineResult
from tandem.core.errors import AdapterError, NotFound, TandemError
from tandem.core.ports import ServingEngine
from tandem.core.version import INTERNAL, AdapterVersion
from tandem.services.answering.answer import GenerationFailed
from tandem.services.answering.models import Models
from tandem.services.auth import ApiKeys
from tandem.services.batches.plan import Line, Plan, read_asks, read_plan
from tandem.services.batches.pool import Pool
from tandem.services.batches.reply import Reply, Respond
from tandem.services.files import Files
from tandem.services.tasks import Backoff
from tandem.store import Store, adapters
from tandem.store import batches as rows

logger = logging.getLogger(__name__)

OUTPUT_PURPOSE = "batch_output"
_AT_ONCE = 500  # lines of a file in memory
_TRIES = 3
_BYTES_A_TOKEN = 3
_ANY_BYTES = 1 << 40
_LOOK_S = 1.0
_WORKING = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)


@dataclass(frozen=True, slots=True)
class BatchTools:
    """What all batches work with. `most_lines` and `most_file_bytes` bound a file, `most_bytes`
    one line of it; `now` is in seconds since the epoch."""

    store: Store
    files: Files
    client: ServingEngine
    models: Models
    keys: ApiKeys
    respond: Respond
    pool: Pool
    most_lines: int
    most_file_bytes: int
    most_bytes: int
    now: Callable[[], float]


class BatchRun:
    """The work on one batch that was claimed; `run` once."""

    def __init__(self, batch: BatchRecord, tools: BatchTools) -> None:
        self.batch = batch
        self._tools = tools
        self._store = tools.store
        self.cancelling = asyncio.Event()
        """Somebody asked for its end."""
        if batch.status is BatchStatus.CANCELLING:
            self.cancelling.set()

    async def run(self) -> None:
        """Bring the batch to its end. Raises `Superseded`, `StoreError`, `OSError`."""
        file = await self._input()
        if file is None:
            await self._fail([BatchError("file_gone", "the input file is gone")])
            return
        limits = self._tools.most_lines, self._tools.most_bytes
        if self.batch.total:  # it was validated; limits that were changed since do not concern it
            limits = self.batch.total, _ANY_BYTES
        plan = await asyncio.to_thread(read_plan, file, self.batch.endpoint, *limits)
        if self.batch.status is BatchStatus.VALIDATING and not await self._begin(plan):
            return
        if len(plan.lines) != self.batch.total:
            raise OSError(f"the input file of {self.batch.batch_id} is not what it was")
        if self.batch.status is not BatchStatus.FINALIZING:
            pinned = await self._pin()
            try:
                await self._answer(file, plan, pinned)
            finally:
                await self._unpin(pinned)
        await self._finalize(file, plan)

    async def _input(self) -> Path | None:
        try:
            return await self._tools.files.content(self.batch.input_file, self.batch.tenant)
        except NotFound:
            return None

    # ------------------------------------------------------------------ beginning

    async def _begin(self, plan: Plan) -> bool:
        """From `validating` on; False if the file is not what it should be."""
        problems = list(plan.errors)
        adapter = version = None
        if not problems:
            try:
                found = await self._tools.models.resolve(plan.model, self.batch.tenant)
                adapter = found.name if not found.checkpoint else None
            except NotFound as error:
                problems = [
                    BatchError(error.code or "model_not_found", str(error), 1, "body.model")
                ]
        if problems:
            await self._fail(problems)
            return False
        if adapter is not None and self.batch.pinned:
            record = await self._store.read(adapters.find, adapter)
            version = record.current if record is not None else None
        changed = replace(
            self.batch, model=plan.model, adapter=adapter, version=version, total=len(plan.lines)
        )
        await self._move(changed, BatchStatus.IN_PROGRESS)
        return True

    async def _fail(self, problems: list[BatchError]) -> None:
        await self._move(replace(self.batch, errors=tuple(problems)), BatchStatus.FAILED)

    async def _pin(self) -> AdapterVersion | None:
        """Load the version that answers all lines, under a name of the batch's own."""
        batch = self.batch
        if batch.adapter is None or not batch.version:
            return None
        record = await self._store.read(adapters.version, batch.adapter, batch.version)
        if record is None:
            return None  # deleted meanwhile: the current one answers
        name = f"{INTERNAL}batch/{batch.batch_id}"
        loaded = AdapterVersion(name, record.number, record.content_hash, record.path)
        try:
            return await self._tools.client.publish_adapter(loaded)
        except AdapterError as error:
            logger.warning("version %s of %s: %s", batch.version, batch.adapter, error)
            return None

    async def _unpin(self, pinned: AdapterVersion | None) -> None:
        if pinned is None:
            return
        try:
            await self._tools.client.unload_adapter(pinned.name)
        except TandemError as error:
            logger.debug("%s was not loaded any more: %s", pinned.name, error)

    # ------------------------------------------------------------------ answering

    async def _answer(self, file: Path, plan: Plan, pinned: AdapterVersion | None) -> None:
        """Results for the lines that have none, until all have one, the time is up, or somebody
        asked for the end."""
        done = await self._store.read(rows.finished, self.batch.batch_id)
        left = [line for line in plan.lines if line.number not in done]
        under_way: set[asyncio.Task[None]] = set()
        ending = asyncio.create_task(self._ending())
        try:
            for line in left:
                taking = asyncio.create_task(self._tools.pool.take(_tokens_of(line)))
                await asyncio.wait((taking, ending), return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    taking.cancel()
                    await asyncio.gather(taking, return_exceptions=True)
                    break
                work = self._line(file, line, pinned, taking.result())
                under_way.add(asyncio.create_task(work))
                under_way = _reaped(under_way)
            while under_way and not ending.done():
                await asyncio.wait({*under_way, ending}, return_when=asyncio.FIRST_COMPLETED)
                under_way = _reaped(under_way)
        finally:
            tasks = [*under_way, ending]
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ending(self) -> None:
        """Wait for the end of the time, or for somebody who asks for the end."""
        while not self.cancelling.is_set() and self._tools.now() < self.batch.expires_s:
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self.cancelling.wait()
            except TimeoutError:
                continue

    async def _line(
        self, file: Path, line: Line, pinned: AdapterVersion | None, taken: int
    ) -> None:
        try:
            [ask] = await asyncio.to_thread(read_asks, file, [line])
            reply = await self._reply(ask.body, pinned)
            response = {
                "status_code": reply.status,
                "request_id": f"req_{uuid.uuid4().hex}",
                "body": reply.body,
            }
            result = LineResult(
                self.batch.batch_id,
                line.number,
                reply.status == 200,
                _content(ask.custom_id, response, None),
                reply.input_tokens,
                reply.cached_tokens,
                reply.output_tokens,
            )
            await self._store.write(rows.keep, self.batch, [result])
        finally:
            self._tools.pool.give_back(taken)

    async def _reply(self, body: bytes, pinned: AdapterVersion | None) -> Reply:
        """What is not the line's fault is tried again: for ever where the server is at fault, a few
        times where it may be the line after all."""
        backoff, failures = Backoff(), 0
        while True:
            caller = self._tools.keys.of_tenant(self.batch.tenant)
            if caller is None:
                return _refused(401, "the API key that sent this batch is not known any more")
            try:
                return await self._tools.respond(self.batch.endpoint, body, caller, pinned)
            except TandemError as error:
                failures += isinstance(error, GenerationFailed)
                if failures == _TRIES:
                    return _refused(500, str(error))
                logger.debug("a line of %s waits: %s", self.batch.batch_id, error)
            await backoff.wait()

    # ------------------------------------------------------------------ the end

    async def _finalize(self, file: Path, plan: Plan) -> None:
        """Give the lines that have no result an error, write both files, end the batch."""
        if self.batch.status is not BatchStatus.FINALIZING:
            await self._close_lines(file, plan)
            counted = await self._store.read(rows.counts, [self.batch.batch_id])
            counts = counted.get(self.batch.batch_id)
            named = replace(
                self.batch,
                output_file=_file_id() if counts and counts.completed else "",
                error_file=_file_id() if counts and counts.failed else "",
            )
            await self._move(named, BatchStatus.FINALIZING)
        for file_id, ok in ((self.batch.output_file, True), (self.batch.error_file, False)):
            if file_id:
                await self._write(file_id, ok=ok)
        await self._move(self.batch, self._final())
        await self._store.write(rows.clear, self.batch)

    def _final(self) -> BatchStatus:
        if BatchStatus.CANCELLING.value in self.batch.stamps:
            return BatchStatus.CANCELLED
        expired = BatchStatus.EXPIRED.value in self.batch.stamps
        return BatchStatus.EXPIRED if expired else BatchStatus.COMPLETED

    async def _close_lines(self, file: Path, plan: Plan) -> None:
        done = await self._store.read(rows.finished, self.batch.batch_id)
        left = [line for line in plan.lines if line.number not in done]
        if not left:
            return
        cancelled = BatchStatus.CANCELLING.value in self.batch.stamps or self.cancelling.is_set()
        code = "batch_cancelled" if cancelled else "batch_expired"
        message = (
            "the batch was cancelled before this request was answered"
            if cancelled
            else "the batch's completion window ended before this request was answered"
        )
        error = {"code": code, "message": message}
        for start in range(0, len(left), _AT_ONCE):
            some = left[start : start + _AT_ONCE]
            asks = await asyncio.to_thread(read_asks, file, some)
            results = [
                LineResult(
                    self.batch.batch_id, line.number, False, _content(ask.custom_id, None, error)
                )
                for line, ask in zip(some, asks, strict=True)
            ]
            await self._store.write(rows.keep, self.batch, results)
        if not cancelled:
            stamps = {**self.batch.stamps, BatchStatus.EXPIRED.value: self._tools.now()}
            self.batch = replace(self.batch, stamps=stamps)

    async def _write(self, file_id: str, *, ok: bool) -> None:
        if await self._tools.files.known(file_id):
            return  # written before a start that ended here
        kind = "output" if ok else "error"
        await self._tools.files.create(
            f"{self.batch.batch_id}_{kind}.jsonl",
            OUTPUT_PURPOSE,
            self.batch.tenant,
            self._contents(ok=ok),
            self.batch.output_kept_s,
            file_id=file_id,
            bounded=False,
        )

    async def _contents(self, *, ok: bool) -> AsyncIterator[bytes]:
        after = 0
        while True:
            found = await self._store.read(
                rows.contents, self.batch.batch_id, ok=ok, after=after, limit=_AT_ONCE
            )
            if not found:
                return
            after = found[-1][0]
            yield "".join(f"{content}\n" for _, content in found).encode()

    async def _move(self, changed: BatchRecord, status: BatchStatus) -> None:
        """Commit the next status, unless somebody has asked for the end meanwhile."""
        stamps = {**changed.stamps, status.value: self._tools.now()}
        moved = replace(changed, status=status, stamps=stamps)
        if await self._store.write(rows.update, moved, (self.batch.status,)):
            self.batch = moved
            return
        kept = await self._store.read(rows.find, self.batch.batch_id)
        assert kept is not None and kept.status is BatchStatus.CANCELLING
        self.cancelling.set()
        stamps |= kept.stamps
        if status is BatchStatus.FAILED:  # nothing was begun: it ends as its file is
            self.batch = replace(moved, stamps=stamps)
        elif status is BatchStatus.IN_PROGRESS:
            self.batch = replace(moved, stamps=stamps, status=BatchStatus.CANCELLING)
        else:
            self.batch = replace(moved, stamps=stamps)
        await self._store.write(rows.update, self.batch, (BatchStatus.CANCELLING,))


def _reaped(tasks: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Those that go on; raises what one of the others raised."""
    for task in tasks:
        if task.done():
            task.result()
    return {task for task in tasks if not task.done()}


def _tokens_of(line: Line) -> int:
    """About; bodies have names of fields in them, too."""
    return math.ceil(line.size / _BYTES_A_TOKEN)


def _content(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> str:
    line = {
        "id": f"batch_req_{uuid.uuid4().hex[:24]}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line).decode()


def _refused(status: int, message: str) -> Reply:
    code, kind = {401: "invalid_api_key"}.get(status, "generation_failed"), "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return Reply(status, {"error": error})


def _file_id() -> str:
    return f"file-{uuid.uuid4().hex}"
