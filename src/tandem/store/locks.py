"""One server at a time: a lock on its directory, and one in PostgreSQL.

Two servers would train on the same samples twice, and each would undo at its start what the other
has begun. Invariant: a commit in PostgreSQL is made on a connection that holds the lock, and no
other server has opened the database since this one did.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path
from typing import IO, Any

from tandem.core.errors import StoreError

logger = logging.getLogger(__name__)

WAIT_S = 5.0
"""How long to wait until a database notices that a server was killed."""

_FILE = "lock"
_WRITTEN = (
    _FILE,
    *("tandem.db", "tandem.db-wal", "tandem.db-shm"),
    *("adapters", "canary", "exports", "files", "jobs"),
)
_SESSION = (
    "SET tcp_keepalives_idle = 10",  # a lost machine is noticed in half a minute
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 4",
)
# One lock per schema of a database. The number is arbitrary.
_TRY = (
    "SELECT pg_try_advisory_lock((7426361::bigint << 32) | oid::bigint) "
    "FROM pg_namespace WHERE nspname = current_schema()"
)
_POLL_S = 0.05
PRIVATE = 0o700
"""A directory that is made holds what everybody said: it is for the server's user alone."""


def lock_directory(directory: Path) -> IO[str]:
    """Make and lock the directory. Closing the returned file unlocks it. Raises `StoreError`, also
    if something in the directory cannot be written, which would otherwise show only later."""
    try:
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        for path in (directory, *(directory / name for name in _WRITTEN)):
            if path.exists() and not os.access(path, os.W_OK):
                raise StoreError(
                    f"the store cannot be written: {path} is read-only. Make it writable for the "
                    "server's user, or choose another store.directory (--store-directory)"
                )
        lock = (directory / _FILE).open("w", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot use the directory {directory}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise StoreError(
            f"another server uses the directory {directory}; stop it or choose another "
            "store.directory"
        ) from None
    return lock


class DatabaseLock:
    """The lock in PostgreSQL, held by the one connection that writes and taken again by each new
    one.

    `opened_by` is the id of this opening in the database; "" before it has one.
    """

    def __init__(self) -> None:
        self.opened_by = ""

    def take(self, raw: Any, _: object) -> None:
        """Take the lock on a new connection of the driver. Waits. Raises `StoreError`."""
        try:
            with raw.cursor() as cursor:
                for setting in _SESSION:
                    cursor.execute(setting)
                _lock(cursor)
                if self.opened_by:
                    self._check(cursor)
            raw.commit()
        except BaseException:
            raw.close()
            raise

    def _check(self, cursor: Any) -> None:
        cursor.execute("SELECT opened_by FROM identity")
        if cursor.fetchone() != (self.opened_by,):
            raise StoreError(
                "the connection to the database was lost, and another server has used it "
                "meanwhile; start this one again"
            )
        logger.warning("the connection to the database was lost and is there again")


def _lock(cursor: Any) -> None:
    """Take the lock, or wait for it. A database without a schema needs none, since making tables
    fails there."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        cursor.execute(_TRY)
        if cursor.fetchone() != (False,):
            return
        if time.monotonic() > deadline_s:
            raise StoreError(
                "another server uses the database (or has just lost its connection to it); stop it "
                "or choose another store.url"
            )
        time.sleep(_POLL_S)
