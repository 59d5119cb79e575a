"""What administrators change of an adapter in the store, each change in one transaction.

Run by `versions`, which sees to the engine, the files and the learner; one is made without them, by
the watch. Invariant: a change is made as a whole, or refused with an error and not made at all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.core.errors import Conflict, NotFound
from tandem.core.learning import (
    AdapterRecord,
    EventRecord,
    SampleState,
    VersionRecord,
    VersionState,
)
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
    version = replace(_stored(connection, name, number), watched=False)
    if version.state is VersionState.PUBLISHED:
        pinned = replace(event, message=f"version {number} pinned")
        adapters.set_current(connection, name, number, pinned)
        return _decided(connection, version), None
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


def parent(connection: Connection, name: str, seen: int) -> int:
    """What the current version was made from (0: the base). Raises `Conflict` if none is.

    If others were published since version `seen` answered, it is that one which is to be left.
    """
    current = adapters.current_version(connection, name)
    if current is None:
        raise nothing_to_roll_back(name)
    if current.number > seen:
        current = adapters.version(connection, name, seen) or current
    return current.parent


def roll_back(
    connection: Connection, name: str, number: int, event: EventRecord
) -> tuple[int, VersionRecord | None]:
    """Make version `number` (0: the base) current; which one that is, and the version (None: the
    base)."""
    record = adapters.find(connection, name)
    before = 0 if record is None else record.current
    message = f"rolled back from version {before} to {number}"
    event = replace(event, message=message, data={"version": number})
    version = adapters.set_current(connection, name, number, event)
    return number, None if version is None else _decided(connection, version)


def roll_back_watched(
    connection: Connection, name: str, number: int, target: int, event: EventRecord
) -> tuple[int, VersionRecord | None] | None:
    """As `roll_back`, from version `number` to `target`, which nobody asked for; the event's
    message is why. None, and nothing is done, if that version is not current or not watched now.

    What it was the first to learn from is refused with it, and not taught again.
    """
    record, version = adapters.find(connection, name), adapters.version(connection, name, number)
    if record is None or record.current != number or version is None or not version.watched:
        return None
    why = event.message
    adapters.save_version(connection, replace(version, watched=False, reason=why))
    refused = samples.change_of_version(
        connection, name, number, SampleState.CONSUMED, SampleState.REFUSED
    )
    where = str(target) if target else "the base"
    message = (
        f"version {number} rolled back by itself to {where}: {why}. Its {refused} samples are not "
        f"taught again. If its answers are what you want, publish it: tandem adapters publish "
        f"{name} {number}"
    )
    event = replace(event, message=message, data={"version": target, "from": number})
    return target, adapters.set_current(connection, name, target, event)


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
    samples.release(connection, name)  # those of a candidate that waited
    events.forget(connection, name)
    return jobs.forget_checkpoints(connection, name)


def _decided(connection: Connection, version: VersionRecord) -> VersionRecord:
    """A person wants this version, which was published before: it is not watched any more, and
    what was refused when it was rolled back by itself is taught again."""
    name, number = version.adapter, version.number
    samples.change_of_version(connection, name, number, SampleState.REFUSED, SampleState.CONSUMED)
    return adapters.save_version(connection, replace(version, watched=False))


def _stored(connection: Connection, name: str, number: int) -> VersionRecord:
    version = adapters.version(connection, name, number)
    if version is None:
        raise NotFound(f"adapter '{name}' has no version {number}", param="version")
    return version
