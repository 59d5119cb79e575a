"""Opens the database, and gives the two ways to use it: `write` and `read`.

All writes of a process go through one thread, which puts waiting writes into one transaction (group
commit: callers share one flush to disk). Reads run beside it on their own connections. The event
loop never waits for a disk. Invariant: when `write` returns, its effects are on disk. When it
raises, it had no effect, except if the database was lost during the commit, when the outcome is
unknown.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tandem.core.errors import StoreError
from tandem.core.learning import EventRecord
from tandem.store import identity
from tandem.store.locks import DatabaseLock, lock_directory
from tandem.store.migrate import migrate
from tandem.store.paths import DIRECTORY

__all__ = ["TOLD", "Connection", "Store"]

logger = logging.getLogger(__name__)

TOLD = "told"
"""Key under which a writing connection keeps the events of its transaction."""

Args = ParamSpec("Args")
Result = TypeVar("Result")

_BUSY_MS = 10_000
_READERS = 4
_MOST_IN_ONE_COMMIT = 256
_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}
_SHOWN_STEPS = 10


@dataclass(frozen=True, slots=True)
class _Write:
    """Work for the writer. The future is settled after the commit."""

    work: Callable[[Connection], Any]
    done: Future[Any]


class Store:
    """The durable state of one server. Made by `open`; call `close` before the process ends.

    `write` and `read` take a function whose first argument is the `Connection`, and its other
    arguments. The store calls a written function once and never repeats it. Errors of the database
    are raised as `StoreError`.
    """

    def __init__(self, url: sa.URL, directory: Path, lock: IO[str]) -> None:
        self.directory = directory
        self._lock = lock
        self._writing = _engine(url, directory, writes=True)
        self._reading = _engine(url, directory, writes=False)
        self._database_lock = DatabaseLock()
        if self._writing.dialect.name == "postgresql":
            sa.event.listen(self._writing, "connect", self._database_lock.take)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="store-read")
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._run, name="store-write", daemon=True)
        self._closing = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, directory: str | Path, url: str = "") -> Store:
        """Open (or make) the state in `directory`, with its tables up to date.

        The database is `<directory>/tandem.db`, or the one at `url`. Blocks. Raises `StoreError`,
        also if another server uses the directory or the database, or if the directory belongs to
        another database.
        """
        folder = Path(directory).resolve()
        address = _parse(url, folder)
        store = cls(address, folder, lock_directory(folder))
        try:
            with _translated("open the database"), store._writing.begin() as connection:
                new = migrate(connection)
                database_id, opened_by = identity.confirm(connection, folder, new=new)
            identity.settle(folder, database_id)
            store._database_lock.opened_by = opened_by
            if store._writing.dialect.name == "sqlite":
                with suppress(StoreError):  # of an erasure whose process was killed
                    store._empty_log()
        except OSError as error:
            store._release()
            raise StoreError(f"cannot use the directory {folder}: {error}") from error
        except BaseException:
            store._release()
            raise
        store._writer.start()
        return store

    async def write(
        self,
        work: Callable[Concatenate[Connection, Args], Result],
        *args: Args.args,
        **kwargs: Args.kwargs,
    ) -> Result:
        """Run `work(connection, ...)` in a transaction and return after its commit.

        An exception of `work` undoes its own changes only. If the caller is cancelled, the write
        may or may not be done.
        """
        done: Future[Result] = Future()
        with self._closing:
            if self._closed:
                raise StoreError("the store is closed")
            self._queue.put(_Write(partial(_call, work, args, kwargs), done))
        return await asyncio.wrap_future(done)

    async def read(
        self,
        work: Callable[Concatenate[Connection, Args], Result],
        *args: Args.args,
        **kwargs: Args.kwargs,
    ) -> Result:
        """Run `work(connection, ...)` on a snapshot that includes all finished writes."""

        def run() -> Result:
            with _translated("read"), self._reading.connect() as connection:
                return work(connection, *args, **kwargs)

        if self._closed:
            raise StoreError("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._readers, run)

    async def scrub(self) -> bool:
        """Remove deleted data from the files, too. Called after an erasure was written.

        SQLite overwrites deleted rows with zeros; this empties its log, which may still contain
        them. False if a reader used the log for too long: then the next call empties it, or the end
        of the process. PostgreSQL keeps deleted rows until its VACUUM, so nothing is done there.
        """
        if self._closed:
            raise StoreError("the store is closed")
        if self._writing.dialect.name != "sqlite":
            return True
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._empty_log)

    def _empty_log(self) -> bool:
        """Runs outside of any transaction on the writing connection, while nothing writes."""
        with _translated("empty the log"):
            raw = self._writing.raw_connection()
            try:
                cursor = raw.cursor()
                cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                row = cursor.fetchone()
                cursor.close()
            except sqlite3.Error as error:
                raise StoreError(f"cannot empty the log: {error}") from error
            finally:
                raw.close()
        return row is not None and row[0] == 0  # 1: a reader used it

    def close(self) -> None:
        """Finish waiting writes, then close. Blocks. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        self._writer.join()
        self._readers.shutdown()
        self._release()

    def _release(self) -> None:
        self._writing.dispose()
        self._reading.dispose()
        self._lock.close()

    def _run(self) -> None:
        ended = False
        while not ended:
            batch, ended = self._take()
            if batch:
                self._commit(batch)

    def _take(self) -> tuple[list[_Write], bool]:
        """Waiting writes, at least one; and whether this is the end."""
        batch: list[_Write] = []
        item = self._queue.get()
        while item is not None:
            if item.done.set_running_or_notify_cancel():
                batch.append(item)
            if self._queue.empty() or len(batch) >= _MOST_IN_ONE_COMMIT:
                return batch, False
            item = self._queue.get()
        return batch, True

    def _commit(self, batch: list[_Write]) -> None:
        """One transaction for all writes. Each has a savepoint, so its failure affects no other."""
        results: list[tuple[_Write, Any]] = []
        told: list[EventRecord] = []
        try:
            with _translated("write"), self._writing.begin() as connection:
                connection.info[TOLD] = told
                for item in batch:
                    kept = len(told)
                    try:
                        with _translated("write"), connection.begin_nested():
                            results.append((item, item.work(connection)))
                    except Exception as error:
                        del told[kept:]
                        if connection.invalidated or _is_undone(connection):
                            raise
                        item.done.set_exception(error)
        except Exception as error:
            for item in batch:
                if not item.done.done():
                    item.done.set_exception(error)
            return
        for item, result in results:
            item.done.set_result(result)
        for event in told:
            _log(event)


def _is_undone(connection: Connection) -> bool:
    """Whether the database has rolled back the whole transaction, as SQLite does by itself when
    the disk is full or memory is short. SQLAlchemy does not hear of that."""
    if not connection.in_transaction():
        return True
    raw: Any = connection.connection.dbapi_connection
    return connection.dialect.name == "sqlite" and not raw.in_transaction


def _log(event: EventRecord) -> None:
    """Log an event for operators. Of a job's steps, every tenth is enough."""
    level = _LEVELS.get(event.level, logging.INFO)
    if event.data.get("type") == "metrics" and event.data.get("step", 0) % _SHOWN_STEPS:
        level = logging.DEBUG
    logger.log(level, "%s: %s", event.subject, " ".join(event.message.split()))


def _call(
    work: Callable[Concatenate[Connection, Args], Result],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    connection: Connection,
) -> Result:
    return work(connection, *args, **kwargs)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn errors of the database into `StoreError`."""
    try:
        yield
    except sa.exc.SQLAlchemyError as error:
        raise StoreError(f"cannot {what}: {error.args[0]}") from error


def _parse(url: str, directory: Path) -> sa.URL:
    if not url:
        return sa.URL.create("sqlite+pysqlite", database=str(directory / identity.DATABASE))
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise StoreError("store.url is not a database URL (--store-url)") from None
    backend = parsed.get_backend_name()
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed.set(drivername="sqlite+pysqlite")
    raise StoreError(
        f"store.url: '{backend}' is not supported; use postgresql+psycopg://USER@HOST/DATABASE, "
        "or leave it empty for SQLite in the store's directory"
    )


def _engine(url: sa.URL, directory: Path, *, writes: bool) -> sa.Engine:
    options: dict[str, Any] = {
        "execution_options": {DIRECTORY: directory},
        "pool_size": 1 if writes else _READERS,
        "max_overflow": 0,
        "json_serializer": _dump_json,
    }
    if url.get_backend_name() == "postgresql":
        engine = sa.create_engine(url, pool_pre_ping=True, **options)
        if writes:
            return engine
        return engine.execution_options(postgresql_readonly=True, isolation_level="REPEATABLE READ")
    engine = sa.create_engine(url, poolclass=sa.QueuePool, **options)
    sa.event.listen(engine, "connect", partial(_on_sqlite_connect, writes=writes))
    begin = "BEGIN IMMEDIATE" if writes else "BEGIN"
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _on_sqlite_connect(raw: Any, _: object, *, writes: bool) -> None:
    """Leave transactions to SQLAlchemy (the driver would begin them late); make commits durable."""
    raw.isolation_level = None
    cursor = raw.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
    cursor.execute("PRAGMA foreign_keys=ON")
    if writes:
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA secure_delete=ON")
    else:
        cursor.execute("PRAGMA query_only=ON")
    cursor.close()


def _dump_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
