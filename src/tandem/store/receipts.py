"""Receipts: completions that feedback may refer to while they are kept."""

from __future__ import annotations

import sqlalchemy as sa

from tandem.core.learning import Receipt
from tandem.store.session import Connection
from tandem.store.tables import RECEIPTS, from_row, to_row


def add(connection: Connection, receipt: Receipt) -> None:
    """Keep a receipt."""
    connection.execute(sa.insert(RECEIPTS), to_row(receipt))


def find(connection: Connection, completion_id: str) -> Receipt | None:
    """The receipt of a completion, or None if it is not (or no longer) kept."""
    query = sa.select(RECEIPTS).where(RECEIPTS.c.completion_id == completion_id)
    row = connection.execute(query).mappings().first()
    return None if row is None else from_row(Receipt, row)


def delete_before(connection: Connection, created_s: float, limit: int) -> int:
    """Delete up to `limit` receipts made before `created_s`, oldest first; returns how many."""
    old = (
        sa.select(RECEIPTS.c.completion_id)
        .where(RECEIPTS.c.created_s < created_s)
        .order_by(RECEIPTS.c.created_s)
        .limit(limit)
    )
    done = connection.execute(sa.delete(RECEIPTS).where(RECEIPTS.c.completion_id.in_(old)))
    return done.rowcount
