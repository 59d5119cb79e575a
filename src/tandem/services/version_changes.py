"""What administrators change of an adapter in the store, each change in one transaction.

Run by `versions`, which sees to the engine, the files and the learner. Invariant: a change is made
as a whole, or refused with an error and not made at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.core.errors import Conflict, NotFound
from tandem.core.learning import AdapterRecord, EventRecord, VersionRecord, VersionState
from tandem.store import Connection, adapters, events, jobs, samples


def create(connection: Connection, record: AdapterRecord, settings: dict[str, Any]) -> None:
    """Make an adapter if there is none, and replace its own settings."""
    adapters.create(connection, record)
    adapters.set_settings(connection, record.name, settings)


def publish(
    connection: Connection, name: str, number: int, event: EventRecord
) -> tuple[VersionRecord, list[float] | None]:
    """Make a version current as it is now; it, and when the feedback was stored that it is the
    first to have learned from (None: it was published before)."""
    version = _stored(connection, name, number)
    if version.state is VersionState.PUBLISHED:
        pinned = replace(event, message=f"version {number} pinned")
        adapters.set_current(connection, name, number, pinned)
        return version, None
    used = adapters.trained_on(connection, name, number)
    version = adapters.publish(connection, version, consumed=used, event=event)
    learned = [each for each in samples.get(connection, used) if each.version == number]
    return version, [sample.created_s for sample in learned]


def refuse(connection: Connection, name: str, number: int, event: EventRecord) -> VersionRecord:
    """Give up a candidate, and what it has learned from with it."""
    version = _stored(connection, name, number)
    require_candidate(version)
    version = replace(version, reason=version.reason or "refused by request")
    used = adapters.trained_on(connection, name, number)
    return adapters.refuse(connection, version, consumed=used, event=event)


def roll_back(
    connection: Connection, name: str, number: int | None, event: EventRecord
) -> tuple[int, VersionRecord | None]:
    """Make version `number` (0: the base, None: the parent) current; which one that is, and the
    version (None: the base)."""
    record = adapters.find(connection, name)
    before = 0 if record is None else record.current
    if number is None:
        current = adapters.version(connection, name, before)
        if current is None:
            raise nothing_to_roll_back(name)
        number = current.parent
    message = f"rolled back from version {before} to {number}"
    event = replace(event, message=message, data={"version": number})
    return number, adapters.set_current(connection, name, number, event)


def require_candidate(version: VersionRecord) -> None:
    """Raises `Conflict` if the version does not wait for a decision."""
    if version.state is not VersionState.CANDIDATE:
        raise Conflict(
            f"version {version.number} of '{version.adapter}' is {version.state.value} already"
        )


def nothing_to_roll_back(name: str) -> Conflict:
    """The error to be raised where the base answers."""
    return Conflict(f"'{name}' has no version to roll back", param="version")


def delete(connection: Connection, name: str) -> list[str]:
    """Forget an adapter; the directories of checkpoints that nobody needs then."""
    adapters.delete(connection, name)
    events.forget(connection, name)
    return jobs.forget_checkpoints(connection, name)


def _stored(connection: Connection, name: str, number: int) -> VersionRecord:
    version = adapters.version(connection, name, number)
    if version is None:
        raise NotFound(f"adapter '{name}' has no version {number}", param="version")
    return version
