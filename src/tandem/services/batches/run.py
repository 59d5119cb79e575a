"""One batch from its file to its end: validate, answer line by line, write the files.

Each result is committed before it counts, so a server that starts again goes on with the lines that
have none. Knows one batch; who works on which is the service's. Invariant: at the end every line
has one result, which stands in one of the two files, unless the input was lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.batches import WORKED_UNTIL, BatchError, BatchRecord, BatchStatus, LineResult
from tandem.core.errors import NotFound
from tandem.core.ports import EngineState
from tandem.services.answering.models import Pin
from tandem.services.auth import Caller
from tandem.services.batches.attempts import reply_to
from tandem.services.batches.pinning import VersionGone, pin_of, unpin
from tandem.services.batches.plan import Line, Plan, read_asks, read_plan
from tandem.services.batches.pool import Pool
from tandem.services.batches.tools import BatchTools
from tandem.services.tasks import uninterrupted
from tandem.store import adapters
from tandem.store import batches as rows

logger = logging.getLogger(__name__)

OUTPUT_PURPOSE = "batch_output"
_AT_ONCE = 50  # lines in memory, and results in one commit
# Results in memory: one with the log-probabilities of a long answer has megabytes.
_READ_AT_ONCE = 8
_BYTES_A_TOKEN = 3
_ANY_BYTES = 1 << 40
_LOOK_S = 1.0
_NOTE_S = 60.0  # of a completion window, that a restart may add to it


class BatchRun:
    """The work on one batch that was claimed; `run` once."""

    def __init__(self, batch: BatchRecord, tools: BatchTools) -> None:
        self.batch = batch
        self._tools = tools
        self._store = tools.store
        self.cancelling = asyncio.Event()
        """Somebody asked for its end."""
        self._began_s = 0.0
        self._ran_s = 0.0
        if batch.status is BatchStatus.CANCELLING:
            self.cancelling.set()

    async def run(self) -> None:
        """Bring the batch to its end. Raises `Superseded`, `StoreError`, `OSError`."""
        # From here on the window passes as this server runs, whatever becomes of the clock. A clock
        # that was ahead when the batch was made does not make the window longer.
        known_s = self.batch.stamps.get(WORKED_UNTIL, self.batch.created_s)
        self._began_s = max(known_s, await self._tools.passed.time_s())
        self._ran_s = self._tools.passed.ran_s()
        if self.batch.status is not BatchStatus.FINALIZING and not await self._all_lines():
            return
        for file_id, ok in ((self.batch.output_file, True), (self.batch.error_file, False)):
            if file_id:
                await self._write(file_id, ok=ok)
        await self._move(self.batch, self._final())

    async def _all_lines(self) -> bool:
        """Bring every line to a result; False if the batch has failed before its first."""
        read = await self._read()
        if not self.batch.total and not await self._begin(read):
            return False
        if read is None or len(read[1].lines) != self.batch.total:
            gone = BatchError("file_gone", "the input file is gone, or is not what it was")
            self.batch = replace(self.batch, errors=(gone,))
        else:
            try:
                await self._answer_for(self._tools.keys.of_tenant(self.batch.tenant), *read)
            except VersionGone as error:
                self.batch = replace(self.batch, errors=(BatchError("version_gone", str(error)),))
            await self._close_lines(*read)
        counted = await self._store.read(rows.find, self.batch.batch_id)
        named = replace(
            self.batch,
            output_file=_file_id() if counted and counted.completed else "",
            error_file=_file_id() if counted and counted.failed else "",
        )
        await self._move(named, BatchStatus.FINALIZING)
        return True

    async def _read(self) -> tuple[Path, Plan] | None:
        """The input file and its lines; None if it is gone."""
        try:
            file = await self._tools.files.content(self.batch.input_file, self.batch.tenant)
        except NotFound:
            return None
        limits = self._tools.most_lines, self._tools.most_bytes
        if self.batch.total:  # it was validated; limits that were changed since do not concern it
            limits = self.batch.total, _ANY_BYTES
        async with self._tools.reading:
            plan = await asyncio.to_thread(read_plan, file, self.batch.endpoint, *limits)
        return file, plan

    async def _over(self) -> bool:
        """Whether no line is answered any more. What has passed of the window is committed now and
        then, so the next start goes on from there. Raises `Superseded`, `StoreError`."""
        batch = self.batch
        if self.cancelling.is_set() or BatchStatus.EXPIRED.value in batch.stamps or batch.errors:
            return True
        time_s = self._began_s + self._tools.passed.ran_s() - self._ran_s
        if time_s >= batch.expires_s:
            return True
        if time_s >= batch.stamps.get(WORKED_UNTIL, batch.created_s) + _NOTE_S:
            noted = replace(batch, stamps={**batch.stamps, WORKED_UNTIL: time_s})
            if await self._store.write(rows.update, noted, (batch.status,)):
                self.batch = noted
        return False

    # ------------------------------------------------------------------ beginning

    async def _begin(self, read: tuple[Path, Plan] | None) -> bool:
        """From `validating` on; False if the file is not what it should be."""
        if read is None:
            await self._fail([BatchError("file_gone", "the input file is gone")])
            return False
        plan = read[1]
        problems = list(plan.errors)
        adapter = version = None
        if not problems:
            try:
                tenant = self.batch.tenant
                caller = self._tools.keys.of_tenant(tenant) or Caller(tenant)
                found = await self._tools.models.resolve(plan.model, caller)
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
            # What is loaded by hand answers until it has become a version.
            by_hand = found.adapter is not None and record is not None and not record.current
            version = None if record is None or by_hand else record.current
        changed = replace(
            self.batch, model=plan.model, adapter=adapter, version=version, total=len(plan.lines)
        )
        await self._move(changed, BatchStatus.IN_PROGRESS)
        return True

    async def _fail(self, problems: list[BatchError]) -> None:
        await self._move(replace(self.batch, errors=tuple(problems)), BatchStatus.FAILED)

    # ------------------------------------------------------------------ answering

    async def _answer_for(self, caller: Caller | None, file: Path, plan: Plan) -> None:
        """Results for the lines that have none, until all have one, the time is up, or somebody
        asked for the end. Raises `Superseded`, `StoreError`."""
        done = await self._store.read(rows.finished, self.batch.batch_id)
        left = [line for line in plan.lines if line.number not in done]
        if not left or await self._over():
            return
        if caller is None:  # until a start knows the key, it takes no room from other batches
            logger.warning("%s waits: its API key is not known", self.batch.batch_id)
            await self._ending()
            return
        if not await self._served(caller):
            return
        pin = await pin_of(self.batch, self._tools, self._over)
        try:
            await self._answer(file, left, caller, pin)
        finally:
            await unpin(pin, self._tools)

    async def _served(self, caller: Caller) -> bool:
        """Wait until the engine serves the batch's model; False if the batch is over before. A
        start with another model, or without an adapter, does not refuse its lines."""
        told = False
        while not await self._over():
            try:
                if self._tools.client.state is EngineState.READY:
                    await self._tools.models.resolve(self.batch.model, caller)
                    return True
            except NotFound as error:
                if not told:
                    logger.warning("%s waits: %s", self.batch.batch_id, error)
                told = True
            await self._look_again()
        return False

    async def _answer(
        self, file: Path, left: Sequence[Line], caller: Caller, pin: Pin | None
    ) -> None:
        """The results of `_answer_for`. Raises `Superseded`, `StoreError`."""
        if await self._over():
            return
        working = asyncio.create_task(self._launch(file, left, caller, pin))
        ending = asyncio.create_task(self._ending())
        try:
            done_first, _ = await asyncio.wait(
                (working, ending), return_when=asyncio.FIRST_COMPLETED
            )
            for each in done_first:
                each.result()
        finally:
            for each in (working, ending):
                each.cancel()
            await asyncio.gather(working, ending, return_exceptions=True)

    async def _launch(
        self, file: Path, lines: Sequence[Line], caller: Caller, pin: Pin | None
    ) -> None:
        """Work on lines, each as soon as there is room for it. Raises the first error."""
        pool = self._tools.pool
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    taken = await pool.take(_tokens_of(line))
                    task = group.create_task(self._line(file, line, caller, pin))
                    task.add_done_callback(partial(_give_back, pool, taken))
        except ExceptionGroup as several:
            raise several.exceptions[0] from several

    async def _ending(self) -> None:
        """Wait for the end of the time, or for somebody who asks for the end. Raises `Superseded`,
        `StoreError`."""
        while not await self._over():
            await self._look_again()

    async def _look_again(self) -> None:
        """A moment later, or once somebody asks for the end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await self.cancelling.wait()

    async def _line(self, file: Path, line: Line, caller: Caller, pin: Pin | None) -> None:
        [ask] = await asyncio.to_thread(read_asks, file, [line])
        reply = await reply_to(ask.body, self.batch, caller, self._tools, pin)
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
        # Who closes the lines that are left must see this one, or not.
        await uninterrupted(self._store.write(rows.keep, self.batch, [result]))

    # ------------------------------------------------------------------ the end

    def _final(self) -> BatchStatus:
        if self.batch.errors:
            return BatchStatus.FAILED
        if self._cancelled:
            return BatchStatus.CANCELLED
        expired = BatchStatus.EXPIRED.value in self.batch.stamps
        return BatchStatus.EXPIRED if expired else BatchStatus.COMPLETED

    @property
    def _cancelled(self) -> bool:
        return BatchStatus.CANCELLING.value in self.batch.stamps

    async def _close_lines(self, file: Path, plan: Plan) -> None:
        """Give the lines that have no result an error."""
        done = await self._store.read(rows.finished, self.batch.batch_id)
        left = [line for line in plan.lines if line.number not in done]
        if not left:
            return
        # Why they end is committed first: a start that goes on from here says the same.
        stamps = {**self.batch.stamps}
        if not (self.cancelling.is_set() or self.batch.errors):
            stamps.setdefault(BatchStatus.EXPIRED.value, self._tools.now())
        await self._move(replace(self.batch, stamps=stamps), BatchStatus.IN_PROGRESS)
        error = self._why()
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

    def _why(self) -> dict[str, str]:
        """The error of a line that is not answered."""
        if self.batch.errors:
            return {"code": self.batch.errors[0].code, "message": self.batch.errors[0].message}
        code, why = "batch_expired", "the batch's completion window ended"
        if self._cancelled:
            code, why = "batch_cancelled", "the batch was cancelled"
        return {"code": code, "message": f"{why} before this request was answered"}

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
                rows.contents, self.batch.batch_id, ok=ok, after=after, limit=_READ_AT_ONCE
            )
            if not found:
                return
            after = found[-1][0]
            yield "".join(f"{content}\n" for _, content in found).encode()

    async def _move(self, changed: BatchRecord, status: BatchStatus) -> None:
        """Commit the next status, also when somebody has asked for the end meanwhile: of a batch
        that is being cancelled, the work goes on under that name until its files are written."""
        was = self.batch.status
        stamps = {status.value: self._tools.now(), **changed.stamps}
        if was is BatchStatus.CANCELLING and status is BatchStatus.IN_PROGRESS:
            status = was
        moved = replace(changed, status=status, stamps=stamps)
        if await self._store.write(rows.update, moved, (was,)):
            self.batch = moved
            return
        kept = await self._store.read(rows.find, self.batch.batch_id)
        assert kept is not None and kept.status is BatchStatus.CANCELLING
        self.cancelling.set()
        self.batch = replace(self.batch, status=kept.status)
        stamps = changed.stamps | kept.stamps
        stamps.pop(BatchStatus.EXPIRED.value, None)  # it was cancelled before
        await self._move(replace(changed, stamps=stamps), status)


def _give_back(pool: Pool, taken: int, _: asyncio.Task[None]) -> None:
    pool.give_back(taken)


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


def _file_id() -> str:
    return f"file-{uuid.uuid4().hex}"
