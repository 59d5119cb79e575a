"""Feedback as it was acknowledged, and its erasure with everything derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from tandem.core.learning import Feedback, FeedbackKind, Sample
from tandem.store import adapters, samples
from tandem.store.session import Connection
from tandem.store.tables import FEEDBACK, RECEIPTS, SAMPLES, from_row, in_chunks, to_row


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects feedback. None matches any; all given conditions must hold."""

    adapter: str | None = None
    user: str | None = None
    key_id: str | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Feedback with its samples. `digest` is a hash of what the client sent."""

    feedback: Feedback
    samples: tuple[Sample, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Erased:
    """What an erasure removed and affected.

    `tainted` are versions (adapter, number) that learned from the feedback. `in_training` are
    adapters whose next candidate has seen some of it: their working parameters must be discarded.
    """

    feedback: int = 0
    samples: int = 0
    receipts: int = 0
    tainted: tuple[tuple[str, int], ...] = ()
    in_training: frozenset[str] = field(default_factory=frozenset)


def add(
    connection: Connection,
    feedback: Feedback,
    made: Sequence[Sample],
    *,
    idempotency_key: str | None = None,
    digest: str = "",
    same: str | None = None,
) -> None:
    """Keep feedback and the samples made from it. The id and the key must be new.

    It replaces feedback with the same hash `same`. Samples of the replaced feedback that no version
    has learned from become invalid.
    """
    if same is not None:
        _supersede(connection, same, feedback.feedback_id)
    row = {**to_row(feedback), "idempotency_key": idempotency_key, "digest": digest, "same": same}
    connection.execute(sa.insert(FEEDBACK), row)
    samples.add(connection, made)


def _supersede(connection: Connection, same: str, feedback_id: str) -> None:
    earlier = sa.update(FEEDBACK).where(FEEDBACK.c.same == same, FEEDBACK.c.superseded_by.is_(None))
    done = earlier.values(superseded_by=feedback_id).returning(FEEDBACK.c.feedback_id)
    withdrawn = _sample_ids(connection, list(connection.execute(done).scalars()))
    samples.invalidate(connection, dict.fromkeys(withdrawn, f"superseded by {feedback_id}"))


def find(connection: Connection, feedback_id: str) -> Stored | None:
    """Feedback by its id."""
    return _find(connection, FEEDBACK.c.feedback_id == feedback_id)


def find_by_key(connection: Connection, key_id: str, idempotency_key: str) -> Stored | None:
    """Feedback by the idempotency key that an API key's owner gave it."""
    return _find(
        connection,
        sa.and_(FEEDBACK.c.key_id == key_id, FEEDBACK.c.idempotency_key == idempotency_key),
    )


def listed(
    connection: Connection, which: Filter, *, after: str | None = None, limit: int = 20
) -> list[Stored]:
    """Feedback, newest first, older than feedback `after`."""
    query = sa.select(FEEDBACK).where(*_conditions(which))
    if after is not None:
        last = sa.select(FEEDBACK.c.row).where(FEEDBACK.c.feedback_id == after).scalar_subquery()
        query = query.where(FEEDBACK.c.row < last)
    rows = connection.execute(query.order_by(FEEDBACK.c.row.desc()).limit(limit)).mappings().all()
    return _with_samples(connection, rows)


@dataclass(frozen=True, slots=True)
class Thumb:
    """A rating that counts: up or down, and the API key that gave it."""

    up: bool
    key_id: str = ""


def ratings(
    connection: Connection, adapter: str, signal: str, labels: Sequence[str], limit: int
) -> dict[str, list[Thumb]]:
    """Ratings of one signal among an adapter's newest `limit` feedback, oldest first, by the label
    of the rated version, of those in `labels`. If an answer has several ratings, the last one
    counts; one of 0.5 takes them back."""
    names = ("row", "kind", "signal", "version", "completion_id", "chosen", "rating", "key_id")
    newest = (
        sa.select(*(FEEDBACK.c[name] for name in names))
        .where(FEEDBACK.c.adapter == adapter)
        .order_by(FEEDBACK.c.row.desc())
        .limit(limit)
        .subquery()
    ).c
    query = (
        sa.select(newest.version, newest.completion_id, newest.chosen, newest.rating, newest.key_id)
        .where(
            newest.kind == FeedbackKind.RATING.value,
            newest.signal == signal,
            newest.version.in_(labels),
        )
        .order_by(newest.row)
    )
    last: dict[tuple[str, str, str], tuple[float, str]] = {}
    for version, completion_id, chosen, rating, key_id in connection.execute(query):
        last[version, completion_id, chosen] = rating, key_id
    found: dict[str, list[Thumb]] = {}
    for (version, _, _), (rating, key_id) in last.items():
        if rating != 0.5:  # else it was taken back
            found.setdefault(version, []).append(Thumb(rating > 0.5, key_id))
    return found


def erase(connection: Connection, which: Filter, *, feedback_id: str | None = None) -> Erased:
    """Delete feedback, its samples and receipts, and mark the versions that learned from it.

    With `user`, all receipts of that user are deleted too (only those of the API key, if given).
    """
    conditions = _conditions(which)
    if feedback_id is not None:
        conditions.append(FEEDBACK.c.feedback_id == feedback_id)
    chosen = connection.execute(
        sa.select(FEEDBACK.c.feedback_id, FEEDBACK.c.completion_id).where(*conditions)
    ).all()
    feedback_ids = [row.feedback_id for row in chosen]
    made = _sample_ids(connection, feedback_ids)
    tainted, in_training = adapters.taint(connection, made)
    receipts = _erase_receipts(connection, [row.completion_id for row in chosen], which)
    for chunk in in_chunks(feedback_ids):
        connection.execute(sa.delete(FEEDBACK).where(FEEDBACK.c.feedback_id.in_(chunk)))
    return Erased(len(feedback_ids), len(made), receipts, tainted, in_training)


def _erase_receipts(connection: Connection, ids: Sequence[str], which: Filter) -> int:
    gone = 0
    for chunk in in_chunks(ids):
        named = sa.delete(RECEIPTS).where(RECEIPTS.c.completion_id.in_(chunk))
        gone += connection.execute(named).rowcount
    if which.user:
        of_user = sa.delete(RECEIPTS).where(RECEIPTS.c.user == which.user)
        if which.key_id is not None:
            of_user = of_user.where(RECEIPTS.c.tenant == which.key_id)
        if which.adapter is not None:
            of_user = of_user.where(RECEIPTS.c.adapter == which.adapter)
        gone += connection.execute(of_user).rowcount
    return gone


def _sample_ids(connection: Connection, feedback_ids: Sequence[str]) -> list[str]:
    found: list[str] = []
    for chunk in in_chunks(feedback_ids):
        query = sa.select(SAMPLES.c.sample_id).where(SAMPLES.c.feedback_id.in_(chunk))
        found.extend(connection.execute(query).scalars())
    return found


def _find(connection: Connection, condition: sa.ColumnElement[bool]) -> Stored | None:
    rows = connection.execute(sa.select(FEEDBACK).where(condition)).mappings().all()
    stored = _with_samples(connection, rows)
    return stored[0] if stored else None


def _with_samples(connection: Connection, rows: Sequence[sa.RowMapping]) -> list[Stored]:
    made: dict[str, list[Sample]] = {row["feedback_id"]: [] for row in rows}
    for chunk in in_chunks(list(made)):
        query = sa.select(SAMPLES).where(SAMPLES.c.feedback_id.in_(chunk)).order_by(SAMPLES.c.row)
        for found in connection.execute(query).mappings():
            made[found["feedback_id"]].append(from_row(Sample, found))
    return [
        Stored(from_row(Feedback, row), tuple(made[row["feedback_id"]]), row["digest"])
        for row in rows
    ]


def _conditions(which: Filter) -> list[sa.ColumnElement[bool]]:
    conditions: list[sa.ColumnElement[bool]] = []
    if which.adapter is not None:
        conditions.append(FEEDBACK.c.adapter == which.adapter)
    if which.user is not None:
        conditions.append(FEEDBACK.c.user == which.user)
    if which.key_id is not None:
        conditions.append(FEEDBACK.c.key_id == which.key_id)
    if which.state is not None:
        in_state = sa.select(SAMPLES.c.feedback_id).where(SAMPLES.c.state == which.state)
        conditions.append(FEEDBACK.c.feedback_id.in_(in_state))
    return conditions
