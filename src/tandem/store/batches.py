"""Batches and the results of their lines.

One start of one server works on a batch at a time. `claim` increments `batch.start`; a commit with
an older number raises `Superseded`. Invariant: each line has one result at most, and no result
comes from a start that is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from tandem.core.batches import BatchCounts, BatchRecord, BatchStatus, LineResult
from tandem.core.errors import Conflict
from tandem.store.session import Connection
from tandem.store.tables import BATCH_RESULTS, BATCHES, from_row, to_row

_OPEN = [status.value for status in BatchStatus if not status.ended]


class Superseded(Conflict):
    """Another start of the server works on the batch."""


def add(connection: Connection, batch: BatchRecord) -> None:
    """Keep a new batch."""
    connection.execute(sa.insert(BATCHES), to_row(batch))


def find(connection: Connection, batch_id: str) -> BatchRecord | None:
    """One batch."""
    query = sa.select(BATCHES).where(BATCHES.c.batch_id == batch_id)
    row = connection.execute(query).mappings().first()
    return None if row is None else from_row(BatchRecord, row)


def listed(
    connection: Connection, tenant: str, *, after: str | None = None, limit: int = 20
) -> list[BatchRecord]:
    """Batches of a tenant, newest first, those older than batch `after`."""
    query = sa.select(BATCHES).where(BATCHES.c.tenant == tenant)
    if after is not None:
        last = sa.select(BATCHES.c.row).where(BATCHES.c.batch_id == after).scalar_subquery()
        query = query.where(BATCHES.c.row < last)
    rows = connection.execute(query.order_by(BATCHES.c.row.desc()).limit(limit)).mappings()
    return [from_row(BatchRecord, row) for row in rows]


def unfinished(connection: Connection) -> list[BatchRecord]:
    """Batches of all tenants that have not ended, oldest first."""
    query = sa.select(BATCHES).where(BATCHES.c.status.in_(_OPEN)).order_by(BATCHES.c.row)
    return [from_row(BatchRecord, row) for row in connection.execute(query).mappings()]


def reading(connection: Connection, file_id: str) -> str | None:
    """A batch that has not ended and reads this file."""
    query = sa.select(BATCHES.c.batch_id).where(
        BATCHES.c.input_file == file_id, BATCHES.c.status.in_(_OPEN)
    )
    return connection.execute(query).scalar()


def being_read(connection: Connection) -> set[str]:
    """The input files of all batches that have not ended."""
    query = sa.select(BATCHES.c.input_file).where(BATCHES.c.status.in_(_OPEN))
    return set(connection.execute(query).scalars())


def claim(connection: Connection, batch_id: str) -> BatchRecord | None:
    """Let a new start work on a batch; None if it has ended, or is gone."""
    batch = find(connection, batch_id)
    if batch is None or batch.status.ended:
        return None
    claimed = replace(batch, start=batch.start + 1)
    _write(connection, claimed)
    return claimed


def update(connection: Connection, batch: BatchRecord, was: Sequence[BatchStatus]) -> bool:
    """Replace a batch if its status is one of `was`. Returns whether it was replaced.

    Raises `Superseded`.
    """
    kept = _own(connection, batch)
    if kept.status not in was:
        return False
    _write(connection, batch)
    return True


def cancel(connection: Connection, batch_id: str, now_s: float) -> BatchRecord | None:
    """Ask for the end of a batch, whoever works on it; the batch as it is then."""
    batch = find(connection, batch_id)
    if batch is None or batch.status.ended or batch.status is BatchStatus.FINALIZING:
        return batch
    if batch.status is not BatchStatus.CANCELLING:
        stamps = {**batch.stamps, BatchStatus.CANCELLING.value: now_s}
        batch = replace(batch, status=BatchStatus.CANCELLING, stamps=stamps)
        _write(connection, batch)
    return batch


def keep(connection: Connection, batch: BatchRecord, results: Sequence[LineResult]) -> None:
    """Commit results of lines that have none. Raises `Superseded`."""
    _own(connection, batch)
    connection.execute(sa.insert(BATCH_RESULTS), [to_row(result) for result in results])


def finished(connection: Connection, batch_id: str) -> set[int]:
    """The lines that have a result."""
    query = sa.select(BATCH_RESULTS.c.number).where(BATCH_RESULTS.c.batch_id == batch_id)
    return set(connection.execute(query).scalars())


def counts(connection: Connection, batch_ids: Sequence[str]) -> dict[str, BatchCounts]:
    """Sums over the results of each batch that has some."""
    table = BATCH_RESULTS.c
    ok = sa.case((table.ok, 1), else_=0)
    query = (
        sa.select(
            table.batch_id,
            sa.func.sum(ok),
            sa.func.count() - sa.func.sum(ok),
            sa.func.sum(table.input_tokens),
            sa.func.sum(table.cached_tokens),
            sa.func.sum(table.output_tokens),
        )
        .where(table.batch_id.in_(list(batch_ids)))
        .group_by(table.batch_id)
    )
    return {row[0]: BatchCounts(*map(int, row[1:])) for row in connection.execute(query)}


def contents(
    connection: Connection, batch_id: str, *, ok: bool, after: int, limit: int
) -> list[tuple[int, str]]:
    """Numbers and lines of results in the order of the input, those that follow line `after`."""
    table = BATCH_RESULTS.c
    query = (
        sa.select(table.number, table.content)
        .where(table.batch_id == batch_id, table.ok == ok, table.number > after)
        .order_by(table.number)
        .limit(limit)
    )
    return [(row[0], row[1]) for row in connection.execute(query)]


def clear(connection: Connection, batch: BatchRecord) -> None:
    """Empty the content of results that are written to files. The rows stay for `counts`."""
    _own(connection, batch)
    same = BATCH_RESULTS.c.batch_id == batch.batch_id
    connection.execute(sa.update(BATCH_RESULTS).where(same).values(content=""))


def _own(connection: Connection, batch: BatchRecord) -> BatchRecord:
    kept = find(connection, batch.batch_id)
    if kept is None or kept.start != batch.start:
        raise Superseded(f"another start of the server works on batch {batch.batch_id}")
    return kept


def _write(connection: Connection, batch: BatchRecord) -> None:
    same = BATCHES.c.batch_id == batch.batch_id
    connection.execute(sa.update(BATCHES).where(same).values(to_row(batch)))
