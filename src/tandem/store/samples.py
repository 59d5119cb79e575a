"""Samples and their states: `accepted -> assigned -> consumed | refused`.

Invariant: every change of state names the state that it starts from. So a sample is used for the
first time exactly once, however many callers ask for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tandem.core.learning import Sample, SampleKind, SampleState, Split, VersionState
from tandem.store.session import Connection
from tandem.store.tables import (
    ADAPTERS,
    FEEDBACK,
    SAMPLES,
    USES,
    VERSIONS,
    from_row,
    in_chunks,
    to_row,
)


@dataclass(frozen=True, slots=True)
class SampleHead:
    """What selection needs of a sample, without its text."""

    row: int  # grows with arrival
    sample_id: str
    kind: SampleKind
    created_s: float
    weight: float
    uses: int
    loss: float | None
    version: int | None
    conversation: str
    user: str
    key_id: str
    desirable: bool = True
    refusals: int = 0  # refused candidates to which it was new
    deaths: int = 0  # of the engine that trained it; not kept in the store


_REFUSALS = (
    sa.select(sa.func.count())
    .select_from(USES)
    .join(VERSIONS, (VERSIONS.c.adapter == USES.c.adapter) & (VERSIONS.c.number == USES.c.version))
    .where(
        USES.c.sample_id == SAMPLES.c.sample_id,
        ~USES.c.replayed,
        VERSIONS.c.state == VersionState.REFUSED.value,
    )
    .correlate(SAMPLES)
    .scalar_subquery()
    .label("refusals")
)
_REPLACED = sa.exists().where(
    FEEDBACK.c.feedback_id == SAMPLES.c.feedback_id, FEEDBACK.c.superseded_by.is_not(None)
)
_HEAD = (
    *(SAMPLES.c[name] for name in SampleHead.__dataclass_fields__ if name in SAMPLES.c),
    _REFUSALS,
)


def add(connection: Connection, samples: Sequence[Sample]) -> None:
    """Keep new samples, in order."""
    if samples:
        connection.execute(sa.insert(SAMPLES), [to_row(sample) for sample in samples])


def heads(
    connection: Connection,
    adapter: str,
    state: SampleState = SampleState.ACCEPTED,
    split: Split = Split.TRAIN,
    *,
    newest_first: bool = False,
    limit: int = 10_000,
    without: Collection[int] = (),
    fair: bool = False,
) -> list[SampleHead]:
    """Samples of an adapter without their text, in order of arrival (or reversed); none that a
    version of `without` was the first to learn from.

    Used for selection (`ACCEPTED`), replay (`CONSUMED`, without what later feedback has replaced)
    and recovery (`ASSIGNED`). What may wait without end must not fill the `limit`: of accepted ones
    dislikes come last, and with `fair` each API key has as much of it as the others.
    """
    query = sa.select(*_HEAD).where(
        SAMPLES.c.adapter == adapter, SAMPLES.c.split == split.value, SAMPLES.c.state == state.value
    )
    if state is SampleState.CONSUMED:
        query = query.where(~_REPLACED)
    if without:
        query = query.where(SAMPLES.c.version.is_(None) | SAMPLES.c.version.not_in(without))
    order = SAMPLES.c.row.desc() if newest_first else SAMPLES.c.row.asc()
    liked = SAMPLES.c.desirable.is_(True)
    found: list[SampleHead] = []
    turn = sa.func.row_number().over(partition_by=SAMPLES.c.key_id, order_by=order)
    for these in (liked, ~liked) if state is SampleState.ACCEPTED else (sa.true(),):
        some, left = query.where(these), limit - len(found)
        rows = connection.execute(some.order_by(order).limit(left)).mappings().all()
        if fair and len(rows) == left:  # there may be more: each key in its turn
            rows = connection.execute(some.order_by(turn, order).limit(left)).mappings().all()
            rows = sorted(rows, key=lambda row: int(row["row"]), reverse=newest_first)
        found += [from_row(SampleHead, row) for row in rows]
    return found


def more_dislikes(connection: Connection, sample_ids: Sequence[str]) -> bool:
    """Whether, up to the last of these samples of one adapter, more answers that are rated down
    wait than answers that are rated up wait in all."""
    last = sa.select(sa.func.max(SAMPLES.c.row)).where(SAMPLES.c.sample_id.in_(sample_ids))
    adapter = sa.select(SAMPLES.c.adapter).where(SAMPLES.c.sample_id == sample_ids[0])
    waiting = sa.select(sa.func.count()).where(
        SAMPLES.c.adapter == adapter.scalar_subquery(),
        SAMPLES.c.split == Split.TRAIN.value,
        SAMPLES.c.state == SampleState.ACCEPTED.value,
        SAMPLES.c.kind == SampleKind.KTO.value,
    )
    likes = waiting.where(SAMPLES.c.desirable.is_(True))
    dislikes = waiting.where(
        SAMPLES.c.desirable.is_(False), SAMPLES.c.row <= last.scalar_subquery()
    )
    return bool(connection.execute(dislikes).scalar_one() > connection.execute(likes).scalar_one())


def get(connection: Connection, sample_ids: Sequence[str]) -> list[Sample]:
    """Whole samples in the order of `sample_ids`. Deleted ones are left out."""
    found: dict[str, Sample] = {}
    for chunk in in_chunks(sample_ids):
        rows = connection.execute(sa.select(SAMPLES).where(SAMPLES.c.sample_id.in_(chunk)))
        found.update({row["sample_id"]: from_row(Sample, row) for row in rows.mappings()})
    return [found[sample_id] for sample_id in sample_ids if sample_id in found]


def claim(connection: Connection, sample_ids: Sequence[str]) -> list[Sample]:
    """`ACCEPTED -> ASSIGNED` for training samples; returns those that this call assigned, whole."""
    claimed = _move(
        connection,
        sample_ids,
        SampleState.ACCEPTED,
        {"state": SampleState.ASSIGNED.value},
        SAMPLES.c.split == Split.TRAIN.value,
    )
    return get(connection, [sample_id for sample_id in sample_ids if sample_id in claimed])


def release(connection: Connection, adapter: str | None = None) -> int:
    """`ASSIGNED -> ACCEPTED` for all of an adapter (None: of all adapters); returns how many. Used
    for recovery.

    Samples of a candidate that waits for a decision stay assigned.
    """
    waiting = (
        sa.select(USES.c.sample_id)
        .join(
            VERSIONS, (VERSIONS.c.adapter == USES.c.adapter) & (VERSIONS.c.number == USES.c.version)
        )
        .where(VERSIONS.c.state == VersionState.CANDIDATE.value)
    )
    back = sa.update(SAMPLES).where(
        SAMPLES.c.state == SampleState.ASSIGNED.value, SAMPLES.c.sample_id.not_in(waiting)
    )
    if adapter is not None:
        back = back.where(SAMPLES.c.adapter == adapter)
    return connection.execute(back.values(state=SampleState.ACCEPTED.value)).rowcount


def try_again(connection: Connection, sample_ids: Sequence[str], most: int) -> list[str]:
    """`ASSIGNED -> ACCEPTED` for samples of a refused candidate, unless `most` candidates to which
    they were new were refused (this one included). Returns the samples that are not tried again."""
    tired: list[str] = []
    for chunk in in_chunks(sample_ids):
        known = connection.execute(
            sa.select(SAMPLES.c.sample_id, _REFUSALS).where(SAMPLES.c.sample_id.in_(chunk))
        )
        tired += [sample_id for sample_id, refusals in known if refusals >= most]
    again = [sample_id for sample_id in sample_ids if sample_id not in set(tired)]
    _move(connection, again, SampleState.ASSIGNED, {"state": SampleState.ACCEPTED.value})
    return tired


def refused_for(connection: Connection, adapter: str) -> set[int]:
    """The refused versions that count against samples which are still to be learned."""
    query = (
        sa.select(USES.c.version)
        .join(SAMPLES, SAMPLES.c.sample_id == USES.c.sample_id)
        .where(
            USES.c.adapter == adapter,
            ~USES.c.replayed,
            SAMPLES.c.state.in_((SampleState.ACCEPTED.value, SampleState.ASSIGNED.value)),
        )
        .distinct()
    )
    return set(connection.execute(query).scalars())


def finish(
    connection: Connection, sample_ids: Sequence[str], state: SampleState, version: int
) -> int:
    """`ASSIGNED -> CONSUMED` or `REFUSED`, with a version's number; returns how many were assigned.

    `REFUSED` or `ACCEPTED -> CONSUMED` if that version was refused before, so that its samples may
    have been given back, and is now published anyway.
    """
    assert state in (SampleState.CONSUMED, SampleState.REFUSED)
    values = {"state": state.value, "version": version}
    finished = _move(connection, sample_ids, SampleState.ASSIGNED, values)
    if state is SampleState.CONSUMED:
        refused = SAMPLES.c.version == version
        _move(connection, sample_ids, SampleState.REFUSED, values, refused)
        learned = sa.exists().where(
            USES.c.sample_id == SAMPLES.c.sample_id,
            USES.c.adapter == SAMPLES.c.adapter,
            USES.c.version == version,
        )
        _move(connection, sample_ids, SampleState.ACCEPTED, values, learned)
    return len(finished)


def change_of_version(
    connection: Connection, adapter: str, version: int, start: SampleState, end: SampleState
) -> int:
    """`CONSUMED -> REFUSED` for all samples that a version learned from first, or back; how many.

    What it only knew already (`selection.known`) is accepted again, unless later feedback has
    replaced it.
    """
    assert {start, end} == {SampleState.CONSUMED, SampleState.REFUSED}
    learned = sa.exists().where(
        USES.c.sample_id == SAMPLES.c.sample_id,
        USES.c.adapter == adapter,
        USES.c.version == version,
    )
    change = sa.update(SAMPLES).where(
        SAMPLES.c.adapter == adapter,
        SAMPLES.c.version == version,
        SAMPLES.c.state == start.value,
    )
    if end is SampleState.REFUSED:
        replaced = {"state": SampleState.INVALID.value, "problem": "superseded"}
        connection.execute(change.where(~learned, _REPLACED).values(replaced))
        connection.execute(change.where(~learned).values(state=SampleState.ACCEPTED.value))
    return connection.execute(change.where(learned).values(state=end.value)).rowcount


def hand_on(connection: Connection, adapter: str, version: int, child: int) -> None:
    """What a version consumed counts as consumed by its child: the version is to be deleted, and a
    roll back leaves both behind."""
    change = sa.update(SAMPLES).where(
        SAMPLES.c.adapter == adapter,
        SAMPLES.c.version == version,
        SAMPLES.c.state == SampleState.CONSUMED.value,
    )
    connection.execute(change.values(version=child))


def invalidate(connection: Connection, problems: Mapping[str, str]) -> int:
    """Set samples to `INVALID`, each with its problem; returns how many were unused.

    For samples that prove unusable when they are prepared or trained on.
    """
    waiting = (SampleState.ACCEPTED.value, SampleState.ASSIGNED.value)
    done = 0
    for sample_id, problem in problems.items():
        change = sa.update(SAMPLES).where(
            SAMPLES.c.sample_id == sample_id, SAMPLES.c.state.in_(waiting)
        )
        values = {"state": SampleState.INVALID.value, "problem": problem}
        done += connection.execute(change.values(values)).rowcount
    return done


def record_losses(connection: Connection, losses: Mapping[str, float]) -> None:
    """A step was applied: store the loss of each sample, and count one more use of each."""
    if losses:
        change = (
            sa.update(SAMPLES)
            .where(SAMPLES.c.sample_id == sa.bindparam("id"))
            .values(loss=sa.bindparam("new_loss"), uses=SAMPLES.c.uses + 1)
        )
        rows = [{"id": sample_id, "new_loss": loss} for sample_id, loss in losses.items()]
        connection.execute(change, rows)


def held_out(connection: Connection, adapter: str, *, limit: int = 1000) -> list[Sample]:
    """The newest valid held-out samples of an adapter, newest first."""
    query = sa.select(SAMPLES).where(
        SAMPLES.c.adapter == adapter,
        SAMPLES.c.split == Split.HELD_OUT.value,
        SAMPLES.c.state == SampleState.ACCEPTED.value,
    )
    rows = connection.execute(query.order_by(SAMPLES.c.row.desc()).limit(limit)).mappings()
    return [from_row(Sample, row) for row in rows]


def split_of(connection: Connection, adapter: str, conversation: str) -> Split | None:
    """The split of a conversation in an adapter; None if it has no samples."""
    query = sa.select(SAMPLES.c.split).where(
        SAMPLES.c.adapter == adapter, SAMPLES.c.conversation == conversation
    )
    found = connection.execute(query.order_by(SAMPLES.c.row).limit(1)).scalar()
    return None if found is None else Split(found)


def has_conversations(connection: Connection, adapter: str, number: int) -> bool:
    """Whether an adapter has samples of at least `number` conversations."""
    query = sa.select(SAMPLES.c.conversation).where(SAMPLES.c.adapter == adapter)
    return len(connection.execute(query.distinct().limit(number)).all()) == number


def counts(connection: Connection) -> dict[str, dict[Split, dict[SampleState, int]]]:
    """Number of samples by adapter (existing ones), split and state."""
    key = (SAMPLES.c.adapter, SAMPLES.c.split, SAMPLES.c.state)
    found: dict[str, dict[Split, dict[SampleState, int]]] = {}
    for adapter, split, state, number in connection.execute(
        sa.select(*key, sa.func.count())
        .where(SAMPLES.c.adapter.in_(sa.select(ADAPTERS.c.name)))
        .group_by(*key)
    ):
        by_split = found.setdefault(adapter, {})
        by_split.setdefault(Split(split), {})[SampleState(state)] = number
    return found


def _move(
    connection: Connection,
    sample_ids: Sequence[str],
    start: SampleState,
    values: Mapping[str, object],
    *conditions: sa.ColumnElement[bool],
) -> set[str]:
    moved: set[str] = set()
    for chunk in in_chunks(sample_ids):
        change = sa.update(SAMPLES).where(
            SAMPLES.c.sample_id.in_(chunk), SAMPLES.c.state == start.value, *conditions
        )
        returned = connection.execute(change.values(values).returning(SAMPLES.c.sample_id))
        moved.update(returned.scalars())
    return moved
