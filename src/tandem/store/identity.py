"""Which directory belongs to which database: both contain the same random id.

A starting server removes versions and files that no row names. With another database that would be
all of them, so a mismatched pair is refused. The id of a new pair is written to a temporary file
before the database commits it, and renamed afterwards. A crash in between changes nothing.
Invariant: what `confirm` refuses is left unchanged.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tandem.core.errors import StoreError
from tandem.store.tables import (
    ADAPTERS,
    CHECKPOINTS,
    DELETED_ADAPTERS,
    FILES,
    IDENTITY,
    JOBS,
    VERSIONS,
)

FILE = "database-id"
DATABASE = "tandem.db"
ADOPT = "adopt"
"""An operator writes this into the file to join a directory and a database on purpose."""

_PATHS = (
    (VERSIONS.c.path, "adapters", 3),
    (FILES.c.path, "files", 2),
    (JOBS.c.checkpoint_path, "jobs", 3),
    (CHECKPOINTS.c.path, "jobs", 3),
)
"""Columns with paths, the folder of the paths, and the number of parts from that folder on."""


def confirm(connection: Connection, directory: Path, *, new: bool) -> tuple[str, str]:
    """Check that the two belong together, in the caller's transaction, before anything is used.

    `new`: the database's tables were just made. Returns their id, and an id of this opening. After
    the commit, call `settle` with the former. Raises `StoreError`.
    """
    kept = connection.execute(sa.select(IDENTITY.c.database_id)).scalar()
    found, aside = _read(directory / FILE), _read(_aside(directory))
    if found is None and kept is None:
        if not _used_together(connection, directory, new):
            raise _refused(directory, "it holds the files of another database")
    elif found is None and kept != aside:
        raise _refused(directory, f"it has no file {FILE} (is its disk mounted?)")
    elif found not in (None, kept, ADOPT):
        raise _refused(directory, f"its file {FILE} names another one")
    ahead = None if found == ADOPT else _ahead(connection, directory)
    if ahead is not None:
        raise _refused(directory, f"it holds {ahead}, which is newer than the database")
    opened_by = uuid.uuid4().hex
    if kept is None:
        kept = uuid.uuid4().hex
        _rebase(connection)
        row = {"database_id": kept, "opened_by": opened_by}
        connection.execute(sa.insert(IDENTITY), row)
    else:
        connection.execute(sa.update(IDENTITY).values(opened_by=opened_by))
    if found != kept:
        _write(_aside(directory), kept)
    return kept, opened_by


def settle(directory: Path, database_id: str) -> None:
    """Give the committed id its final name in the directory."""
    aside = _aside(directory)
    if _read(aside) == database_id:
        aside.replace(directory / FILE)
        _flush(directory)


def _used_together(connection: Connection, directory: Path, new: bool) -> bool:
    """Whether a database and a directory without an id (new, or of an older Tandem) are a pair."""
    url = connection.engine.url
    within = (
        url.get_backend_name() == "sqlite"
        and Path(url.database or "").resolve().parent == directory
    )
    if within and not new:
        return True
    roots = {root for _, root in _former_roots(connection)}
    if roots:
        return str(directory) in roots
    folders = {folder for _, folder, _ in _PATHS}
    empty = not any(path for folder in folders for path in (directory / folder).glob("*"))
    return empty and (within or not (directory / DATABASE).exists())


def _ahead(connection: Connection, directory: Path) -> str | None:
    """A version whose number was never given, from the view of an older copy of the database.

    A number is committed before any file is named after it.
    """
    given: dict[str, int] = {}
    for table in (ADAPTERS, DELETED_ADAPTERS):
        for name, number in connection.execute(sa.select(table.c.name, table.c.next_number)):
            given[name] = number
    for path in sorted((directory / "adapters").glob("*/*")):
        name, number = path.parent.name, path.name
        if number.isdecimal() and int(number) >= given.get(name, 1):
            return f"version {number} of '{name}'"
    return None


def _former_roots(connection: Connection) -> Iterator[tuple[sa.Column[str], str]]:
    """Directories that rows of an older Tandem name in full, by column."""
    for column, folder, depth in _PATHS:
        found = set()
        for path in connection.execute(sa.select(column).distinct()).scalars():
            parts = Path(path).parts
            if Path(path).is_absolute() and parts[-depth:][:1] == (folder,):
                found.add(str(Path(*parts[:-depth])))
        for root in sorted(found):
            yield column, root


def _rebase(connection: Connection) -> None:
    """Cut such paths down to the part below the directory."""
    for column, root in list(_former_roots(connection)):
        start = f"{root.rstrip('/')}/"
        change = sa.update(column.table).where(sa.func.substr(column, 1, len(start)) == start)
        rest = sa.func.substr(column, len(start) + 1)
        connection.execute(change.values({column: rest}))


def _refused(directory: Path, why: str) -> StoreError:
    return StoreError(
        f"the directory {directory} does not belong to the database: {why}. Choose the "
        "store.directory and the store.url that belong together, or a new directory for a new "
        f"database. To join these two for good, as after restoring both from a backup, write the "
        f"word '{ADOPT}' into {directory / FILE} and start again: versions and files that the "
        "database does not name are then removed"
    )


def _aside(directory: Path) -> Path:
    return directory / f"{FILE}.tmp"


def _read(file: Path) -> str | None:
    return file.read_text("utf-8", "replace").strip() if file.is_file() else None


def _write(file: Path, text: str) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.write(f"{text}\n")
        stream.flush()
        os.fsync(stream.fileno())


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
