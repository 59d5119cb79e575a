"""What each API key has contributed, counted under a word such as `feedback/494130`.

Counts outlive the counted things: deleting feedback does not restore a key's quota.
"""

from __future__ import annotations

import sqlalchemy as sa

from tandem.store.session import Connection
from tandem.store.tables import KEY_USAGE
from tandem.store.upsert import upsert


def count(connection: Connection, key_id: str, what: str) -> int:
    """Total that was added so far."""
    query = sa.select(KEY_USAGE.c.count).where(
        KEY_USAGE.c.key_id == key_id, KEY_USAGE.c.what == what
    )
    return connection.execute(query).scalar() or 0


def add(connection: Connection, key_id: str, what: str, number: int, now_s: float) -> int:
    """Add `number`; returns the new total."""
    total = count(connection, key_id, what) + number
    row = {"key_id": key_id, "what": what, "count": total, "changed_s": now_s}
    upsert(connection, KEY_USAGE, [row])
    return total


def delete_before(connection: Connection, prefix: str, changed_s: float) -> None:
    """Forget counts under words with this prefix that have not changed since."""
    words = KEY_USAGE.c.what.startswith(prefix, autoescape=True)
    connection.execute(sa.delete(KEY_USAGE).where(words, KEY_USAGE.c.changed_s < changed_s))
