"""Samples on their way `accepted -> assigned -> consumed | refused`.

Every change of state names the state that it starts from, so that a sample is used for the first
time exactly once, whoever asks for it how often.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tandem.core.learning import Sample, SampleKind, SampleState, Split, VersionState
from tandem.store.session import Connection
from tandem.store.tables import ADAPTERS, SAMPLES, USES, VERSIONS, from_row, in_chunks, to_row


@dataclass(frozen=True, slots=True)
class SampleHead:
    """What selection needs of a sample, without its text. `row` grows with arrival; `refusals`
    counts the candidates that learned from it and were refused."""

    row: int
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
    refusals: int = 0


_REFUSALS = (
    sa.select(sa.func.count())
    .select_from(USES)
    .join(VERSIONS, (VERSIONS.c.adapter == USES.c.adapter) & (VERSIONS.c.number == USES.c.version))
    .where(
        USES.c.sample_id == SAMPLES.c.sample_id,
        VERSIONS.c.state == VersionState.REFUSED.value,
    )
    .correlate(SAMPLES)
    .scalar_subquery()
    .label("refusals")
)
_HEAD = (
    *(SAMPLES.c[name] for name in SampleHead.__dataclass_fields__ if name != "refusals"),
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
) -> list[SampleHead]:
    """Samples of an adapter without their text, in order of arrival (or backwards).

    For selection (`ACCEPTED`), for replay (`CONSUMED`), for recovery (`ASSIGNED`).
    """
    query = sa.select(*_HEAD).where(
        SAMPLES.c.adapter == adapter, SAMPLES.c.split == split.value, SAMPLES.c.state == state.value
    )
    order = SAMPLES.c.row.desc() if newest_first else SAMPLES.c.row.asc()
    rows = connection.execute(query.order_by(order).limit(limit)).mappings()
    return [from_row(SampleHead, row) for row in rows]


def get(connection: Connection, sample_ids: Sequence[str]) -> list[Sample]:
    """Whole samples in the order of `sample_ids`; those that are gone are left out."""
    found: dict[str, Sample] = {}
    for chunk in in_chunks(sample_ids):
        rows = connection.execute(sa.select(SAMPLES).where(SAMPLES.c.sample_id.in_(chunk)))
        found.update({row["sample_id"]: from_row(Sample, row) for row in rows.mappings()})
    return [found[sample_id] for sample_id in sample_ids if sample_id in found]


def claim(connection: Connection, sample_ids: Sequence[str]) -> list[Sample]:
    """`ACCEPTED -> ASSIGNED` for training samples; those that this call has assigned, whole."""
    claimed = _move(
        connection,
        sample_ids,
        SampleState.ACCEPTED,
        {"state": SampleState.ASSIGNED.value},
        SAMPLES.c.split == Split.TRAIN.value,
    )
    return get(connection, [sample_id for sample_id in sample_ids if sample_id in claimed])


def release(connection: Connection, adapter: str | None = None) -> int:
    """`ASSIGNED -> ACCEPTED` for all of an adapter (None: of all); how many. For recovery.

    What a kept candidate was trained on stays assigned: its decision is still to come.
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
    """`ASSIGNED -> ACCEPTED` for those of a refused candidate of which fewer than `most` were
    refused, that candidate included; which of `sample_ids` they are not."""
    tired: list[str] = []
    for chunk in in_chunks(sample_ids):
        known = connection.execute(
            sa.select(SAMPLES.c.sample_id, _REFUSALS).where(SAMPLES.c.sample_id.in_(chunk))
        )
        tired += [sample_id for sample_id, refusals in known if refusals >= most]
    again = [sample_id for sample_id in sample_ids if sample_id not in set(tired)]
    _move(connection, again, SampleState.ASSIGNED, {"state": SampleState.ACCEPTED.value})
    return tired


def finish(
    connection: Connection, sample_ids: Sequence[str], state: SampleState, version: int
) -> int:
    """`ASSIGNED -> CONSUMED` or `REFUSED` with a version's number; how many were assigned.

    `REFUSED` or `ACCEPTED -> CONSUMED` if that version had been refused, and its samples perhaps
    given back, and is published all the same.
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
    """`CONSUMED -> REFUSED` for all that a version used first, or back again; how many."""
    assert {start, end} == {SampleState.CONSUMED, SampleState.REFUSED}
    change = sa.update(SAMPLES).where(
        SAMPLES.c.adapter == adapter,
        SAMPLES.c.version == version,
        SAMPLES.c.state == start.value,
    )
    return connection.execute(change.values(state=end.value)).rowcount


def invalidate(connection: Connection, problems: Mapping[str, str]) -> int:
    """To `INVALID`, with the problem of each sample; how many were not used yet.

    For samples that turn out to be unusable when they are prepared or trained on.
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
    """A step was applied: the loss of each of its samples, and one more use of each."""
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
    """The split that an adapter's conversation is in, if it has samples."""
    query = sa.select(SAMPLES.c.split).where(
        SAMPLES.c.adapter == adapter, SAMPLES.c.conversation == conversation
    )
    found = connection.execute(query.limit(1)).scalar()
    return None if found is None else Split(found)


def has_conversations(connection: Connection, adapter: str, number: int) -> bool:
    """Whether an adapter has samples of at least so many conversations."""
    query = sa.select(SAMPLES.c.conversation).where(SAMPLES.c.adapter == adapter)
    return len(connection.execute(query.distinct().limit(number)).all()) == number


def counts(connection: Connection) -> dict[str, dict[Split, dict[SampleState, int]]]:
    """Number of samples by adapter (those that exist), split and state."""
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
