"""Adapters and their versions: numbers, publication, roll back, and the marks of erasure.

Invariants: a number is given only once, even if a name is deleted and made again. `current` of an
adapter is 0 or a published version. Samples change state in the transaction that publishes or
refuses the version that they made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tandem.core.errors import Conflict, NotFound
from tandem.core.learning import (
    IMPORTED,
    AdapterRecord,
    EventRecord,
    SampleState,
    VersionRecord,
    VersionState,
)
from tandem.store import events, references, samples
from tandem.store.paths import from_kept, to_kept
from tandem.store.session import Connection
from tandem.store.tables import (
    ADAPTERS,
    DELETED_ADAPTERS,
    SAMPLES,
    USES,
    VERSIONS,
    from_row,
    in_chunks,
    to_row,
)
from tandem.store.upsert import upsert

VersionKey = tuple[str, int]
"""An adapter's name and a version's number."""


def create(connection: Connection, adapter: AdapterRecord) -> AdapterRecord:
    """Keep a new adapter, unless one of that name exists; returns the one that is kept.

    A deleted name continues its numbers.
    """
    known = find(connection, adapter.name)
    if known is not None:
        return known
    before = DELETED_ADAPTERS.c.name == adapter.name
    number = connection.execute(sa.select(DELETED_ADAPTERS.c.next_number).where(before)).scalar()
    if number is not None:
        adapter = replace(adapter, next_number=max(number, adapter.next_number))
        connection.execute(sa.delete(DELETED_ADAPTERS).where(before))
    connection.execute(sa.insert(ADAPTERS), to_row(adapter))
    return adapter


def find(connection: Connection, name: str) -> AdapterRecord | None:
    """The adapter of this name, or None."""
    row = connection.execute(sa.select(ADAPTERS).where(ADAPTERS.c.name == name)).mappings().first()
    return None if row is None else from_row(AdapterRecord, row)


def listed(connection: Connection) -> list[AdapterRecord]:
    """All adapters, by name."""
    rows = connection.execute(sa.select(ADAPTERS).order_by(ADAPTERS.c.name)).mappings()
    return [from_row(AdapterRecord, row) for row in rows]


def set_settings(connection: Connection, name: str, settings: Mapping[str, Any]) -> None:
    """Replace the adapter's own settings. Raises `NotFound`."""
    change = sa.update(ADAPTERS).where(ADAPTERS.c.name == name).values(settings=dict(settings))
    if not connection.execute(change).rowcount:
        raise _unknown(name)


def allocate(connection: Connection, name: str) -> int:
    """The next version number, given to this caller only. Raises `NotFound`."""
    change = (
        sa.update(ADAPTERS)
        .where(ADAPTERS.c.name == name)
        .values(next_number=ADAPTERS.c.next_number + 1)
        .returning(ADAPTERS.c.next_number)
    )
    after = connection.execute(change).scalar()
    if after is None:
        raise _unknown(name)
    return int(after) - 1


def begin_version(connection: Connection, adapter: AdapterRecord, least: int = 1) -> int:
    """A number of at least `least` for a finished version. The adapter may be new."""
    pass_over(connection, adapter, least - 1)
    return allocate(connection, adapter.name)


def pass_over(connection: Connection, adapter: AdapterRecord, number: int) -> None:
    """Never give numbers up to this one to versions of an adapter, which may be new."""
    after = max(number + 1, create(connection, adapter).next_number)
    change = sa.update(ADAPTERS).where(ADAPTERS.c.name == adapter.name)
    connection.execute(change.values(next_number=after))


def delete(connection: Connection, name: str) -> list[VersionRecord]:
    """Forget an adapter and its versions; the caller then removes the versions' files.

    Its samples stay until their feedback is erased. Its numbers are not given again. Raises
    `NotFound`.
    """
    known, gone = find(connection, name), versions(connection, name)
    if known is None:
        raise _unknown(name)
    connection.execute(sa.delete(ADAPTERS).where(ADAPTERS.c.name == name))
    for each in gone:
        references.forget(connection, each.content_hash)
    row = {"name": name, "next_number": known.next_number}
    connection.execute(sa.insert(DELETED_ADAPTERS), row)
    return gone


def version(connection: Connection, adapter: str, number: int) -> VersionRecord | None:
    """The version with this number, or None."""
    query = sa.select(VERSIONS).where(VERSIONS.c.adapter == adapter, VERSIONS.c.number == number)
    row = connection.execute(query).mappings().first()
    return None if row is None else from_kept(connection, VersionRecord, row)


def current_version(connection: Connection, adapter: str) -> VersionRecord | None:
    """The version that answers, or None: the base does."""
    record = find(connection, adapter)
    return None if record is None else version(connection, adapter, record.current)


def versions(connection: Connection, adapter: str | None = None) -> list[VersionRecord]:
    """Versions of an adapter, or of all (None), by name and number."""
    query = sa.select(VERSIONS).order_by(VERSIONS.c.adapter, VERSIONS.c.number)
    if adapter is not None:
        query = query.where(VERSIONS.c.adapter == adapter)
    return [
        from_kept(connection, VersionRecord, row) for row in connection.execute(query).mappings()
    ]


def left_behind(connection: Connection, adapter: str) -> set[int]:
    """Published versions that the current one does not come from: a roll back has left them."""
    record = find(connection, adapter)
    known = {each.number: each for each in versions(connection, adapter)}
    left = {number for number, each in known.items() if each.state is VersionState.PUBLISHED}
    number = 0 if record is None else record.current
    while number in known:
        left.discard(number)
        number = known[number].parent
    return left


def save_version(
    connection: Connection, record: VersionRecord, sample_ids: Sequence[str] = ()
) -> VersionRecord:
    """Keep a version, new or changed, and the samples it was trained on (replay included).

    A version is tainted if one of its samples was erased meanwhile, or if its parent is tainted.
    Returns the record as kept. Call again with a changed record to change it.
    """
    known = {each.sample_id: each.state for each in samples.get(connection, sample_ids)}
    parent = version(connection, record.adapter, record.parent)
    before = version(connection, record.adapter, record.number)
    tainted = (
        record.tainted
        or len(known) < len(set(sample_ids))
        or (parent is not None and parent.tainted and record.origin != IMPORTED)
        or (before is not None and before.tainted)
    )
    record = replace(record, tainted=tainted)
    upsert(connection, VERSIONS, [to_kept(connection, record)])
    uses = [
        {
            "adapter": record.adapter,
            "version": record.number,
            "sample_id": sample_id,
            "replayed": known[sample_id] is SampleState.CONSUMED,
        }
        for sample_id in sorted(known.keys() - _used_by(connection, record))
    ]
    if uses:
        connection.execute(sa.insert(USES), uses)
    return record


def trained_on(connection: Connection, adapter: str, number: int) -> list[str]:
    """Ids of the samples that a version was trained on, replay included."""
    query = sa.select(USES.c.sample_id).where(USES.c.adapter == adapter, USES.c.version == number)
    return sorted(connection.execute(query).scalars())


def delete_version(
    connection: Connection, adapter: str, number: int, event: EventRecord | None = None
) -> VersionRecord:
    """Forget a version that is neither current nor a candidate, before its files are removed.

    Its children become its parent's. Children that were trained from it inherit the samples that
    they learned from through it, so erasure still finds them; the samples that it consumed are then
    those of the child that the current version comes from. Its number is not given again.
    Returns the deleted record. Raises `NotFound`, `Conflict`.
    """
    known, gone = find(connection, adapter), version(connection, adapter, number)
    if known is None or gone is None:
        raise NotFound(f"adapter '{adapter}' has no version {number}", param="version")
    if known.current == number:
        raise Conflict(
            f"version {number} of '{adapter}' answers; roll back or publish another one first",
            param="version",
        )
    if gone.state is VersionState.CANDIDATE:
        raise Conflict(
            f"version {number} of '{adapter}' waits for a decision; refuse it first",
            param="version",
        )
    left = left_behind(connection, adapter)
    if number in left:  # nobody could tell any more
        samples.change_of_version(
            connection, adapter, number, SampleState.CONSUMED, SampleState.REFUSED
        )
    for child in versions(connection, adapter):
        if child.parent != number:
            continue
        child = replace(child, parent=gone.parent)
        if child.origin == IMPORTED:
            save_version(connection, child)
        else:
            tainted = child.tainted or gone.tainted
            save_version(connection, replace(child, tainted=tainted))
            _inherit_uses(connection, adapter, number, child.number)
        if child.state is VersionState.PUBLISHED and child.number not in left:
            samples.hand_on(connection, adapter, number, child.number)
    same = (VERSIONS.c.adapter == adapter) & (VERSIONS.c.number == number)
    connection.execute(sa.delete(VERSIONS).where(same))
    references.forget(connection, gone.content_hash)
    if event is not None:
        events.add(connection, event)
    return gone


def publish(
    connection: Connection,
    record: VersionRecord,
    *,
    consumed: Sequence[str] = (),
    trained_on: Sequence[str] = (),
    event: EventRecord | None = None,
) -> VersionRecord:
    """Publish in one transaction: the version row, `current`, its samples, its event.

    `consumed` are the assigned samples that it used first. `trained_on` are all its samples, replay
    included. Raises `NotFound` for an unknown adapter.
    """
    record = replace(record, state=VersionState.PUBLISHED)
    record = _conclude(connection, record, consumed, trained_on, event)
    change = sa.update(ADAPTERS).where(ADAPTERS.c.name == record.adapter)
    connection.execute(change.values(current=record.number))
    return record


def refuse(
    connection: Connection,
    record: VersionRecord,
    *,
    consumed: Sequence[str] = (),
    trained_on: Sequence[str] = (),
    event: EventRecord | None = None,
    tries: int = 1,
) -> VersionRecord:
    """Like `publish`, for a refused candidate. `record.reason` says why.

    Its samples become `ACCEPTED` again. Once `tries` candidates to which they were new
    were refused, they become `REFUSED` and are not tried again.
    """
    record = replace(record, state=VersionState.REFUSED)
    if find(connection, record.adapter) is None:
        raise _unknown(record.adapter)
    record = save_version(connection, record, trained_on)
    references.forget(connection, record.content_hash)
    tired = samples.try_again(connection, consumed, tries)
    return _conclude(connection, record, tired, trained_on, event)


def set_current(
    connection: Connection, name: str, number: int, event: EventRecord | None = None
) -> VersionRecord | None:
    """Roll back (or forward) to a published version; 0 is the base. Returns that version.

    Raises `NotFound`, or `Conflict` if that version was never published.
    """
    target = version(connection, name, number)
    if number and target is None:
        raise NotFound(f"adapter '{name}' has no version {number}", param="version")
    if target is not None and target.state is not VersionState.PUBLISHED:
        raise Conflict(
            f"version {number} of '{name}' is {target.state.value}; only a published version can "
            "become current (publish it first)",
            param="version",
        )
    change = sa.update(ADAPTERS).where(ADAPTERS.c.name == name).values(current=number)
    if not connection.execute(change).rowcount:
        raise _unknown(name)
    if event is not None:
        events.add(connection, event)
    return target


def taint(
    connection: Connection, sample_ids: Sequence[str]
) -> tuple[tuple[VersionKey, ...], frozenset[str]]:
    """Mark all versions that learned from these samples, and their descendants.

    Returns the newly tainted versions, and the adapters whose working parameters may be learning
    from such a sample now: it is assigned, may be replayed, or became invalid while it was used.
    """
    users: set[VersionKey] = set()
    training: set[str] = set()
    for chunk in in_chunks(sample_ids):
        used = sa.select(USES.c.adapter, USES.c.version).where(USES.c.sample_id.in_(chunk))
        users.update((adapter, number) for adapter, number in connection.execute(used))
        trained = (SampleState.ASSIGNED.value, SampleState.CONSUMED.value)
        invalid = (SAMPLES.c.state == SampleState.INVALID.value) & (
            SAMPLES.c.problem.startswith("superseded") | (SAMPLES.c.uses > 0)
        )
        of_these = sa.select(SAMPLES.c.adapter).where(
            SAMPLES.c.sample_id.in_(chunk), SAMPLES.c.state.in_(trained) | invalid
        )
        learning = sa.select(SAMPLES.c.adapter).where(
            SAMPLES.c.state == SampleState.ASSIGNED.value, SAMPLES.c.adapter.in_(of_these)
        )
        training.update(connection.execute(learning).scalars())
    tainted: list[VersionKey] = []
    for adapter in sorted({adapter for adapter, _ in users}):
        for record in versions(connection, adapter):  # parents come before their children
            key = (adapter, record.number)
            inherits = record.origin != IMPORTED and (adapter, record.parent) in users
            if key in users or inherits:
                users.add(key)
                tainted.append(key)
    for adapter, number in tainted:
        connection.execute(
            sa.update(VERSIONS)
            .where(VERSIONS.c.adapter == adapter, VERSIONS.c.number == number)
            .values(tainted=True)
        )
    return tuple(tainted), frozenset(training)


def _conclude(
    connection: Connection,
    record: VersionRecord,
    consumed: Sequence[str],
    trained_on: Sequence[str],
    event: EventRecord | None,
) -> VersionRecord:
    if find(connection, record.adapter) is None:
        raise _unknown(record.adapter)
    record = save_version(connection, record, trained_on)
    references.bound(connection)
    published = record.state is VersionState.PUBLISHED
    state = SampleState.CONSUMED if published else SampleState.REFUSED
    samples.finish(connection, consumed, state, record.number)
    if event is not None:
        events.add(connection, event)
    return record


def _inherit_uses(connection: Connection, adapter: str, number: int, child: int) -> None:
    """Let `child` have learned from what version `number` has learned from, in one statement: these
    may be all samples that an adapter ever had."""
    of_child = sa.select(USES.c.sample_id).where(USES.c.adapter == adapter, USES.c.version == child)
    missing = sa.select(USES.c.adapter, sa.literal(child), USES.c.sample_id, sa.true()).where(
        USES.c.adapter == adapter, USES.c.version == number, USES.c.sample_id.not_in(of_child)
    )
    names = ["adapter", "version", "sample_id", "replayed"]
    connection.execute(sa.insert(USES).from_select(names, missing))


def _used_by(connection: Connection, record: VersionRecord) -> set[str]:
    query = sa.select(USES.c.sample_id).where(
        USES.c.adapter == record.adapter, USES.c.version == record.number
    )
    return set(connection.execute(query).scalars())


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no adapter '{name}'", param="adapter")
