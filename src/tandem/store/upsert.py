"""Insert or replace by primary key: one statement, in each database's own dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tandem.store.session import Connection


def upsert(connection: Connection, table: sa.Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert `rows`. If a primary key exists, set the row's other columns."""
    if not rows:
        return
    keys = [column.name for column in table.primary_key]
    changed = [name for name in rows[0] if name not in keys]
    if connection.dialect.name == "postgresql":
        into = postgresql.insert(table)
        new = {name: into.excluded[name] for name in changed}
        connection.execute(into.on_conflict_do_update(index_elements=keys, set_=new), rows)
    else:
        insert = sqlite.insert(table)
        new = {name: insert.excluded[name] for name in changed}
        connection.execute(insert.on_conflict_do_update(index_elements=keys, set_=new), rows)
