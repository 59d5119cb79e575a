"""Rows of files. The bytes are in the file system."""

from __future__ import annotations

import sqlalchemy as sa

from tandem.core.learning import FileRecord
from tandem.store.paths import from_kept, to_kept, whole
from tandem.store.session import Connection
from tandem.store.tables import FILES


def add(connection: Connection, file: FileRecord) -> None:
    """Keep a file's row. Its bytes are already on disk."""
    connection.execute(sa.insert(FILES), to_kept(connection, file))


def find(connection: Connection, file_id: str) -> FileRecord | None:
    """The file with this id, or None."""
    row = connection.execute(sa.select(FILES).where(FILES.c.file_id == file_id)).mappings().first()
    return None if row is None else from_kept(connection, FileRecord, row)


def listed(
    connection: Connection,
    tenant: str,
    *,
    purpose: str | None = None,
    after: str | None = None,
    ascending: bool = False,
    limit: int = 10_000,
) -> list[FileRecord]:
    """Files of a tenant in order of creation, starting after file `after`."""
    query = sa.select(FILES).where(FILES.c.tenant == tenant)
    if purpose is not None:
        query = query.where(FILES.c.purpose == purpose)
    if after is not None:
        last = sa.select(FILES.c.row).where(FILES.c.file_id == after).scalar_subquery()
        query = query.where(FILES.c.row > last if ascending else FILES.c.row < last)
    order = FILES.c.row.asc() if ascending else FILES.c.row.desc()
    rows = connection.execute(query.order_by(order).limit(limit)).mappings()
    return [from_kept(connection, FileRecord, row) for row in rows]


def paths(connection: Connection) -> set[str]:
    """Paths of the bytes of all files."""
    kept = connection.execute(sa.select(FILES.c.path)).scalars()
    return {whole(connection, path) for path in kept}


def expired(connection: Connection, now_s: float) -> list[FileRecord]:
    """Files whose expiry has passed."""
    query = sa.select(FILES).where(FILES.c.expires_s <= now_s)
    return [from_kept(connection, FileRecord, row) for row in connection.execute(query).mappings()]


def delete(connection: Connection, file_id: str) -> bool:
    """Forget a file, before its bytes are removed; returns whether there was one."""
    return connection.execute(sa.delete(FILES).where(FILES.c.file_id == file_id)).rowcount > 0
