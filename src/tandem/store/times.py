"""The newest time in the store, for callers that do not trust the clock."""

from __future__ import annotations

import sqlalchemy as sa

from tandem.store.session import Connection
from tandem.store.tables import BATCHES, FEEDBACK, FILES, RECEIPTS


def newest(connection: Connection) -> float | None:
    """Creation time of the newest client data; None without any."""
    found = (
        connection.execute(sa.select(sa.func.max(table.c.created_s))).scalar()
        for table in (RECEIPTS, FILES, FEEDBACK, BATCHES)
    )
    return max((each for each in found if each is not None), default=None)
