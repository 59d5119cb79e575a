"""Batches and the results of their lines.

One start of one server works on a batch at a time. `claim` increments `batch.start`; a commit with
an older number raises `Superseded`. Invariant: each line has one result at most, and no result
comes from a start that is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from tandem.core.batches import BatchRecord, BatchStatus, LineResult
from tandem.core.errors import Conflict
from tandem.store.session import Connection
from tandem.store.tables import BATCH_RESULTS, BATCHES, from_row, to_row

# What `keep` counts, and nothing else writes.
_COUNTED = ("completed", "failed", "input_tokens", "cached_tokens", "output_tokens")
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


def unfinished(connection: Connection) -> list[str]:
    """Batches of all tenants that have not ended, oldest first."""
    query = sa.select(BATCHES.c.batch_id).where(BATCHES.c.status.in_(_OPEN))
    return list(connection.execute(query.order_by(BATCHES.c.row)).scalars())


def reading(connection: Connection, file_id: str) -> str | None:
    """A batch that has not ended and reads this file."""
    query = sa.select(BATCHES.c.batch_id).where(
        BATCHES.c.input_file == file_id, BATCHES.c.status.in_(_OPEN)
    )
    return connection.execute(query).scalar()


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
    """Ask for the end of a batch, whoever works on it; the batch as it is then. One that ends
    already, for whatever reason, goes on with that."""
    batch = find(connection, batch_id)
    if batch is None or batch.status.ended or batch.status is BatchStatus.FINALIZING:
        return batch
    if batch.errors or BatchStatus.EXPIRED.value in batch.stamps:
        return batch
    if batch.status is not BatchStatus.CANCELLING:
        stamps = {**batch.stamps, BatchStatus.CANCELLING.value: now_s}
        batch = replace(batch, status=BatchStatus.CANCELLING, stamps=stamps)
        _write(connection, batch)
    return batch


def keep(connection: Connection, batch: BatchRecord, results: Sequence[LineResult]) -> None:
    """Commit results of lines that have none, and count them. Raises `Superseded`."""
    _own(connection, batch)
    kept = [
        {"batch_id": each.batch_id, "number": each.number, "ok": each.ok, "content": each.content}
        for each in results
    ]
    connection.execute(sa.insert(BATCH_RESULTS), kept)
    gained = {
        "completed": sum(each.ok for each in results),
        "failed": sum(not each.ok for each in results),
        "input_tokens": sum(each.input_tokens for each in results),
        "cached_tokens": sum(each.cached_tokens for each in results),
        "output_tokens": sum(each.output_tokens for each in results),
    }
    same = BATCHES.c.batch_id == batch.batch_id
    counted = {name: BATCHES.c[name] + more for name, more in gained.items()}
    connection.execute(sa.update(BATCHES).where(same).values(counted))


def finished(connection: Connection, batch_id: str) -> set[int]:
    """The lines that have a result."""
    query = sa.select(BATCH_RESULTS.c.number).where(BATCH_RESULTS.c.batch_id == batch_id)
    return set(connection.execute(query).scalars())


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


def cleared(connection: Connection, batch_id: str, limit: int) -> bool:
    """Remove up to `limit` results of a batch that has ended; whether none is left.

    A few at a time: nobody else writes meanwhile.
    """
    table = BATCH_RESULTS.c
    some = sa.select(table.number).where(table.batch_id == batch_id).limit(limit)
    numbers = list(connection.execute(some).scalars())
    same = (table.batch_id == batch_id) & table.number.in_(numbers)
    connection.execute(sa.delete(BATCH_RESULTS).where(same))
    return len(numbers) < limit


def uncleared(connection: Connection) -> list[str]:
    """Batches that have ended and still have results."""
    query = (
        sa.select(BATCH_RESULTS.c.batch_id)
        .join(BATCHES, BATCHES.c.batch_id == BATCH_RESULTS.c.batch_id)
        .where(BATCHES.c.status.not_in(_OPEN))
        .distinct()
    )
    return list(connection.execute(query).scalars())


def num_open(connection: Connection, tenant: str) -> int:
    """How many batches of a tenant have not ended."""
    query = sa.select(sa.func.count()).where(
        BATCHES.c.tenant == tenant, BATCHES.c.status.in_(_OPEN)
    )
    return int(connection.execute(query).scalar_one())


def pinned(connection: Connection, adapter: str) -> dict[int, str]:
    """Versions of an adapter that answer batches which have not ended, each with such a batch."""
    query = sa.select(BATCHES.c.version, BATCHES.c.batch_id).where(
        BATCHES.c.adapter == adapter, BATCHES.c.status.in_(_OPEN), BATCHES.c.version.is_not(None)
    )
    return {int(row[0]): row[1] for row in connection.execute(query)}


def answered_by(connection: Connection, adapter: str) -> str | None:
    """A batch that has not ended and that an adapter answers."""
    query = sa.select(BATCHES.c.batch_id).where(
        BATCHES.c.adapter == adapter, BATCHES.c.status.in_(_OPEN)
    )
    return connection.execute(query.limit(1)).scalar_one_or_none()


def _own(connection: Connection, batch: BatchRecord) -> BatchRecord:
    kept = find(connection, batch.batch_id)
    if kept is None:
        raise Superseded(f"batch {batch.batch_id} is gone")
    if kept.start != batch.start:
        raise Superseded(f"another start of the server works on batch {batch.batch_id}")
    return kept


def _write(connection: Connection, batch: BatchRecord) -> None:
    same = BATCHES.c.batch_id == batch.batch_id
    row = {name: value for name, value in to_row(batch).items() if name not in _COUNTED}
    connection.execute(sa.update(BATCHES).where(same).values(row))
