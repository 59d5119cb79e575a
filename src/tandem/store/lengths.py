"""How long finished answers were, by model and adapter: what lengths are predicted from.

Invariant: of each adapter of a model only the newest rows are kept, lines of batches apart, and of
all only `MOST_ROWS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tandem.core.lengths import Asked
from tandem.store.session import Connection
from tandem.store.tables import ANSWER_LENGTHS, from_row, to_row

MOST_OF_AN_ADAPTER = 2048
MOST_ROWS = 32_768


def add(connection: Connection, model: str, ended: Sequence[tuple[Asked, int]]) -> None:
    """Keep how many tokens answers of a model had, and forget the oldest."""
    if not ended:
        return
    rows = [{"model": model, "output_tokens": tokens, **to_row(asked)} for asked, tokens in ended]
    connection.execute(sa.insert(ANSWER_LENGTHS), rows)
    for adapter, of_batches in {asked.traffic for asked, _ in ended}:
        batch = ANSWER_LENGTHS.c.batch
        of_it = (
            ANSWER_LENGTHS.c.model == model,
            ANSWER_LENGTHS.c.adapter == adapter,
            batch != "" if of_batches else batch == "",
        )
        _forget(connection, MOST_OF_AN_ADAPTER, *of_it)
    _forget(connection, MOST_ROWS)


def recent(connection: Connection, model: str) -> list[tuple[Asked, int]]:
    """What is kept of a model, oldest first."""
    query = sa.select(ANSWER_LENGTHS).where(ANSWER_LENGTHS.c.model == model)
    rows = connection.execute(query.order_by(ANSWER_LENGTHS.c.row)).mappings()
    return [(from_row(Asked, row), row["output_tokens"]) for row in rows]


def _forget(connection: Connection, kept: int, *which: sa.ColumnElement[bool]) -> None:
    """Delete all but the newest."""
    row = ANSWER_LENGTHS.c.row
    newest = sa.select(row).where(*which).order_by(row.desc())
    oldest = connection.execute(newest.offset(kept).limit(1)).scalar()
    if oldest is not None:
        connection.execute(sa.delete(ANSWER_LENGTHS).where(row <= oldest, *which))
