"""Files that clients upload and jobs produce: bytes in the store's directory, rows in the store.

Bytes are written aside, flushed and renamed before their row is committed; a row goes before its
bytes. Knows neither HTTP nor what is in a file. A clock that is set wrong removes nothing: what
this server has kept for as long as it was to has expired, of earlier files what `Passed` says.
Invariant: the bytes of every row are complete; what a crash left without a row is removed at the
next start, what has expired within a minute. Callers see their own files only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

from tandem.core.errors import Conflict, InvalidRequest, NotFound, StoreError
from tandem.core.learning import FileRecord
from tandem.services.durable import flush_directory, make_directory
from tandem.services.passed import Passed
from tandem.store import Connection, Store, batches, jobs
from tandem.store import files as rows

UPLOAD_PURPOSES = ("fine-tune", "batch", "user_data")
_PARTIAL = ".partial"
_SWEEP_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class Files:
    """All files below `directory`; `max_bytes` bounds one of them."""

    def __init__(
        self,
        store: Store,
        directory: Path,
        max_bytes: int,
        now: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self._store = store
        self._directory = directory
        self._now = now
        self._monotonic = monotonic
        self._passed = Passed(store, now, monotonic)
        self._due_s: dict[str, float] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Remove what crashes have left, how many files that were; and from then on, what has
        expired, until `stop`. Nothing is kept before."""
        await self._passed.time_s()
        known = await self._store.read(rows.paths)
        lost = await asyncio.to_thread(self._clean, known)
        self._sweeper = asyncio.create_task(self._sweep_regularly())
        return lost

    async def stop(self) -> None:
        """End the sweeping."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def sweep(self) -> int:
        """Remove the files that have expired; how many that were."""
        passed_s, ran_s = await self._passed.time_s(), self._monotonic()
        found = [
            file
            for file in await self._store.read(rows.expired, self._now())
            if self._due_s.get(file.file_id, math.inf) <= ran_s
            or (file.expires_s is not None and file.expires_s <= passed_s)
        ]
        removed = 0
        for file in found:
            with suppress(Conflict):  # once its reader has ended
                await self._remove(file)
                removed += 1
        return removed

    async def create(
        self,
        filename: str,
        purpose: str,
        tenant: str,
        parts: AsyncIterator[bytes],
        kept_s: float | None = None,
        *,
        file_id: str = "",
        bounded: bool = True,
    ) -> FileRecord:
        """Keep what `parts` yields, for `kept_s` seconds (None: until it is deleted), under a new
        id or `file_id`.

        Raises `InvalidRequest` if it is empty or, where it is `bounded`, too large; `StoreError`
        and `OSError` if it cannot be kept.
        """
        path = self._directory / (file_id or f"file-{uuid.uuid4().hex}")
        partial = path.with_name(path.name + _PARTIAL)
        try:
            size_bytes = await self._write(partial, parts, bounded=bounded)
            await asyncio.to_thread(_finish, partial, path)
            now_s = self._now()
            file = FileRecord(
                file_id=path.name,
                created_s=now_s,
                filename=filename,
                purpose=purpose,
                num_bytes=size_bytes,
                path=str(path),
                tenant=tenant,
                expires_s=None if kept_s is None else now_s + kept_s,
            )
            await self._add(file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        if kept_s is not None:
            self._due_s[file.file_id] = self._monotonic() + kept_s
        return file

    async def _add(self, file: FileRecord) -> None:
        """Commit the row; without one, the bytes go. Raises `StoreError`."""
        try:
            await self._store.write(rows.add, file)
        except StoreError:
            with suppress(StoreError, OSError):  # then the next start removes the bytes
                # As a write, which waits for the end of one whose connection was lost.
                if await self._store.write(rows.find, file.file_id) is None:
                    await asyncio.to_thread(Path(file.path).unlink, missing_ok=True)
            raise

    async def listed(
        self,
        tenant: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        ascending: bool = False,
        limit: int = 10_000,
    ) -> list[FileRecord]:
        """Files of a tenant by age, those that follow file `after`. Raises `NotFound`."""
        if after is not None:
            await self.find(after, tenant, "after")
        return await self._store.read(
            rows.listed, tenant, purpose=purpose, after=after, ascending=ascending, limit=limit
        )

    async def find(self, file_id: str, tenant: str, param: str = "file_id") -> FileRecord:
        """One file of a tenant. Raises `NotFound`."""
        file = await self._store.read(rows.find, file_id)
        if file is None or file.tenant != tenant:
            raise NotFound(f"there is no file '{file_id[:100]}'", param=param)
        return file

    async def known(self, file_id: str) -> bool:
        """Whether there is a file of this id, whosever it is."""
        return await self._store.read(rows.find, file_id) is not None

    async def content(self, file_id: str, tenant: str) -> Path:
        """Where the bytes of a file lie. Raises `NotFound`, also if they are gone."""
        file = await self.find(file_id, tenant)
        path = Path(file.path)
        if not await asyncio.to_thread(path.is_file):
            raise gone(file)
        return path

    async def delete(self, file_id: str, tenant: str) -> None:
        """Forget a file and remove its bytes. Raises `NotFound`, and `Conflict` while a batch or
        a fine-tuning job reads it."""
        await self._remove(await self.find(file_id, tenant))

    async def _remove(self, file: FileRecord) -> None:
        await self._store.write(_delete, file.file_id)
        self._due_s.pop(file.file_id, None)
        await asyncio.to_thread(Path(file.path).unlink, missing_ok=True)

    async def _sweep_regularly(self) -> None:
        while True:
            try:
                await self.sweep()
            except (StoreError, OSError) as error:
                _log.error("expired files cannot be removed", exc_info=error)
            await asyncio.sleep(_SWEEP_EVERY_S)

    async def _write(self, path: Path, parts: AsyncIterator[bytes], *, bounded: bool) -> int:
        size_bytes = 0
        await asyncio.to_thread(make_directory, self._directory)
        with await asyncio.to_thread(path.open, "wb") as stream:
            async for part in parts:
                size_bytes += len(part)
                if bounded and size_bytes > self.max_bytes:
                    raise InvalidRequest(
                        f"the file has more than {self.max_bytes} bytes; send less, or raise "
                        "store.max_file_bytes",
                        param="file",
                    )
                await asyncio.to_thread(stream.write, part)
            if not size_bytes:
                raise InvalidRequest("the file is empty", param="file")
            await asyncio.to_thread(_flush, stream.fileno(), stream.flush)
        return size_bytes

    def _clean(self, known: set[str]) -> int:
        if not self._directory.is_dir():
            return 0
        lost = [path for path in self._directory.glob("file-*") if str(path) not in known]
        for path in lost:
            path.unlink()
        return len(lost)


def gone(file: FileRecord) -> NotFound:
    """What is said where the row of a file is there and its bytes are not."""
    return NotFound(
        f"the bytes of the file '{file.file_id}' ({file.filename[:100]}) are gone from this "
        "server's directory; upload it again",
        param="file_id",
        code="file_gone",
    )


def _flush(number: int, flush: Callable[[], None]) -> None:
    flush()
    os.fsync(number)


def _delete(connection: Connection, file_id: str) -> None:
    reader = batches.reading(connection, file_id) or jobs.reading(connection, file_id)
    if reader is not None:
        raise Conflict(
            f"the file '{file_id}' is read by {reader}; cancel that first, or wait for its end",
            param="file_id",
        )
    rows.delete(connection, file_id)


def _finish(partial: Path, path: Path) -> None:
    """Rename, and make the name itself durable."""
    partial.rename(path)
    flush_directory(path.parent)
