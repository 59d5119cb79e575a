"""The history of adapters and jobs, line by line.

The log has the events too: the writer logs them after the commit (`session.Store`). Only the log
tells where the store's directory is. Invariant: an event that was undone is in neither.
"""

from __future__ import annotations

import sqlalchemy as sa

from tandem.core.learning import EventRecord
from tandem.store.paths import without_directory
from tandem.store.session import TOLD, Connection
from tandem.store.tables import EVENTS, from_row, to_row


def add(connection: Connection, event: EventRecord) -> int:
    """Append an event; returns its number, which only grows. `event.number` is ignored."""
    connection.info.setdefault(TOLD, []).append(event)
    row = to_row(event)
    del row["number"]
    row["message"] = without_directory(connection, event.message)
    number = connection.execute(sa.insert(EVENTS).returning(EVENTS.c.number), row).scalar_one()
    return int(number)


def listed(
    connection: Connection, subject: str, *, before: int | None = None, limit: int = 20
) -> list[EventRecord]:
    """Events of a subject, newest first, older than number `before`."""
    query = sa.select(EVENTS).where(EVENTS.c.subject == subject)
    if before is not None:
        query = query.where(EVENTS.c.number < before)
    rows = connection.execute(query.order_by(EVENTS.c.number.desc()).limit(limit)).mappings()
    return [from_row(EventRecord, row) for row in rows]


def forget(connection: Connection, subject: str) -> None:
    """Delete the history of a subject."""
    connection.execute(sa.delete(EVENTS).where(EVENTS.c.subject == subject))
