from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from records import fill, make_sample, make_version

from tandem.core.errors import Conflict, NotFound
from tandem.core.learning import IMPORTED, AdapterRecord, EventRecord, SampleState, VersionState
from tandem.services.versions.retention import Retention, forget_versions
from tandem.store import Connection, Store, adapters, events, references, samples


async def state_of(store: Store, sample_id: str) -> SampleState:
    return (await store.read(samples.get, [sample_id]))[0].state


async def test_creating_again_changes_nothing(store: Store) -> None:
    first = AdapterRecord("formal", 1.0, settings={"rank": 4})
    assert await store.write(adapters.create, first) == first
    assert await store.write(adapters.create, AdapterRecord("formal", 2.0)) == first
    await store.write(adapters.set_settings, "formal", {"rank": 8})
    assert await store.read(adapters.listed) == [replace(first, settings={"rank": 8})]
    assert await store.read(adapters.find, "other") is None


async def test_numbers_are_given_once(store: Store) -> None:
    await store.write(adapters.create, AdapterRecord("formal", 1.0))
    numbers = await asyncio.gather(*(store.write(adapters.allocate, "formal") for _ in range(30)))
    assert sorted(numbers) == list(range(1, 31))
    with pytest.raises(NotFound):
        await store.write(adapters.allocate, "other")


async def test_publishing_is_one_step(store: Store) -> None:
    ids = await store.write(fill, 4)
    await store.write(samples.claim, ids[:2])
    event = EventRecord("formal", 3.0, "info", "published", {"version": 1})
    kept = await store.write(
        adapters.publish, make_version(1), consumed=ids[:2], trained_on=ids[:3], event=event
    )
    assert kept.state is VersionState.PUBLISHED
    assert (await store.read(adapters.version, "formal", 1)) == kept
    assert (await store.read(adapters.find, "formal")).current == 1
    found = await store.read(samples.get, ids)
    assert [(sample.state.value, sample.version) for sample in found] == [
        ("consumed", 1),
        ("consumed", 1),
        ("accepted", None),
        ("accepted", None),
    ]
    assert await store.read(events.listed, "formal") == [replace(event, number=1)]


async def test_a_publication_that_fails_leaves_nothing(store: Store) -> None:
    ids = await store.write(fill, 2)
    await store.write(samples.claim, ids)

    def publish_and_fail(connection: Connection) -> None:
        adapters.publish(connection, make_version(1), consumed=ids, trained_on=ids)
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        await store.write(publish_and_fail)
    assert await store.read(adapters.versions, "formal") == []
    assert (await store.read(adapters.find, "formal")).current == 0
    assert await state_of(store, "s0") is SampleState.ASSIGNED


async def test_refusal_consumes_its_samples(store: Store) -> None:
    ids = await store.write(fill, 2)
    await store.write(samples.claim, ids)
    await store.write(adapters.publish, make_version(1))
    refused = replace(make_version(2), reason="canary")
    kept = await store.write(adapters.refuse, refused, consumed=ids, trained_on=ids)
    assert (kept.state, kept.reason) == (VersionState.REFUSED, "canary")
    assert (await store.read(adapters.find, "formal")).current == 1
    assert await state_of(store, "s1") is SampleState.REFUSED


async def test_scores_of_versions_that_are_gone_are_forgotten(store: Store) -> None:
    await store.write(fill, 0)
    for number in range(1, 5):
        await store.write(references.put, f"hash{number}@base", {"text": -1.0})
    for number in (1, 2, 3):
        await store.write(adapters.publish, make_version(number))
    await store.write(adapters.refuse, make_version(4))
    await store.write(adapters.delete_version, "formal", 1)
    left = [await store.read(references.get, f"hash{n}@base", ["text"]) for n in range(1, 5)]
    assert left == [{}, {"text": -1.0}, {"text": -1.0}, {}]
    await store.write(adapters.delete, "formal")
    assert await store.read(references.get, "hash3@base", ["text"]) == {}


async def test_scores_are_forgotten_once_they_are_many(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "_MOST_ROWS", 2)
    await store.write(fill, 0)
    for number in (1, 2, 3):
        await store.write(references.put, "base:w:d", {f"text {number}": -1.0})
        await store.write(adapters.publish, make_version(number))
        known = await store.read(references.get, "base:w:d", [f"text {n}" for n in (1, 2, 3)])
        assert len(known) == number % 3


async def test_a_refused_version_counts_until_its_samples_are_learned(store: Store) -> None:
    ids = await store.write(fill, 2)
    await store.write(samples.claim, ids)
    await store.write(adapters.refuse, make_version(1), consumed=ids, trained_on=ids, tries=3)
    for number in (2, 3, 4):
        await store.write(adapters.publish, make_version(number))
    gone = await store.write(forget_versions, "formal", Retention(1), 5.0)
    assert [record.number for record in gone] == [2]
    assert [head.refusals for head in await store.read(samples.heads, "formal")] == [1, 1]
    await store.write(samples.claim, ids)
    await store.write(samples.finish, ids, SampleState.CONSUMED, 4)
    gone = await store.write(forget_versions, "formal", Retention(1), 5.0)
    assert [record.number for record in gone] == [1]


async def test_a_candidate_may_wait_for_its_decision(store: Store) -> None:
    ids = await store.write(fill, 2)
    await store.write(samples.claim, ids)
    candidate = make_version(1)
    await store.write(adapters.save_version, candidate, ids)
    assert await store.read(adapters.versions) == [candidate]
    assert (await store.read(adapters.find, "formal")).current == 0
    await store.write(adapters.publish, candidate, consumed=ids, trained_on=ids)
    assert (await store.read(adapters.find, "formal")).current == 1


async def test_recovery_leaves_the_samples_of_a_waiting_candidate_alone(store: Store) -> None:
    ids = await store.write(fill, 3)
    await store.write(samples.claim, ids)
    await store.write(adapters.save_version, make_version(1), ids[:2])
    assert await store.write(samples.release) == 1
    assert await state_of(store, ids[0]) is SampleState.ASSIGNED
    with pytest.raises(Conflict, match="waits for a decision"):
        await store.write(adapters.delete_version, "formal", 1)
    await store.write(adapters.refuse, make_version(1), consumed=ids[:2])
    assert await store.write(samples.release) == 0
    await store.write(adapters.publish, make_version(2))
    with pytest.raises(Conflict, match="answers"):
        await store.write(adapters.delete_version, "formal", 2)


async def test_what_a_deleted_version_learned_stays_known_of_its_children(store: Store) -> None:
    ids = await store.write(fill, 3)
    for number in (1, 2, 3):
        await store.write(adapters.publish, make_version(number), trained_on=[ids[number - 1]])
    await store.write(adapters.save_version, make_version(3, state=VersionState.PUBLISHED), ids[:1])
    await store.write(adapters.save_version, make_version(2, state=VersionState.PUBLISHED), ids[:1])
    event = EventRecord("formal", 1.0, "info", "deleted")
    gone = await store.write(adapters.delete_version, "formal", 2, event)
    assert gone.path == "/versions/2"
    assert [told.message for told in await store.read(events.listed, "formal")] == ["deleted"]
    kept = await store.read(adapters.versions, "formal")
    assert [(record.number, record.parent) for record in kept] == [(1, 0), (3, 1)]
    assert await store.read(adapters.trained_on, "formal", 3) == ids
    tainted, _ = await store.write(adapters.taint, [ids[1]])
    assert tainted == (("formal", 3),)
    with pytest.raises(NotFound):
        await store.write(adapters.delete_version, "formal", 2)


async def test_what_a_deleted_version_consumed_is_left_behind_with_its_child(store: Store) -> None:
    """A roll back to before both teaches it no more; else it would be replayed."""
    ids = await store.write(fill, 2)
    await store.write(samples.claim, ids)
    await store.write(adapters.publish, make_version(1), consumed=ids, trained_on=ids[:1])
    await store.write(adapters.publish, make_version(2))
    await store.write(adapters.refuse, make_version(3, parent=1))
    await store.write(adapters.publish, make_version(4, parent=2))
    await store.write(adapters.delete_version, "formal", 1)
    assert [sample.version for sample in await store.read(samples.get, ids)] == [2, 2]
    await store.write(adapters.set_current, "formal", 0)
    assert await store.read(adapters.left_behind, "formal") == {2, 4}
    await store.write(adapters.delete_version, "formal", 2)
    assert await state_of(store, ids[0]) is SampleState.REFUSED
    assert await state_of(store, ids[1]) is SampleState.ACCEPTED


async def test_what_was_consumed_before_an_import_is_left_behind_with_it(store: Store) -> None:
    ids = await store.write(fill, 1)
    await store.write(samples.claim, ids)
    await store.write(adapters.publish, make_version(1), consumed=ids, trained_on=ids)
    await store.write(adapters.publish, make_version(2, origin=IMPORTED))
    await store.write(adapters.delete_version, "formal", 1)
    assert [sample.version for sample in await store.read(samples.get, ids)] == [2]
    assert await store.read(adapters.trained_on, "formal", 2) == []


async def test_children_of_a_deleted_tainted_version_are_tainted(store: Store) -> None:
    await store.write(fill, 0)
    await store.write(adapters.publish, make_version(1, tainted=True))
    await store.write(adapters.publish, make_version(2))
    await store.write(adapters.delete_version, "formal", 1)
    assert (await store.read(adapters.version, "formal", 2)).tainted


async def test_roll_back(store: Store) -> None:
    await store.write(fill, 0)
    for number in (1, 2):
        await store.write(adapters.publish, make_version(number))
    await store.write(adapters.refuse, make_version(3))
    event = EventRecord("formal", 3.0, "info", "rolled back")
    assert (await store.write(adapters.set_current, "formal", 1, event)).number == 1
    assert (await store.read(adapters.find, "formal")).current == 1
    assert await store.write(adapters.set_current, "formal", 0) is None
    with pytest.raises(Conflict, match="refused"):
        await store.write(adapters.set_current, "formal", 3)
    with pytest.raises(NotFound):
        await store.write(adapters.set_current, "formal", 9)
    with pytest.raises(NotFound):
        await store.write(adapters.set_current, "other", 0)


async def test_taint_reaches_descendants_only(store: Store) -> None:
    ids = await store.write(fill, 4)
    await store.write(adapters.publish, make_version(1), trained_on=ids[:1])
    await store.write(adapters.publish, make_version(2), trained_on=ids[1:2])
    await store.write(adapters.publish, make_version(3), trained_on=ids[2:3])
    await store.write(adapters.publish, replace(make_version(4), parent=1))
    await store.write(samples.claim, [ids[3]])
    tainted, training = await store.write(adapters.taint, [ids[1], ids[3]])
    assert tainted == (("formal", 2), ("formal", 3))
    assert training == {"formal"}
    marked = [record.number for record in await store.read(adapters.versions) if record.tainted]
    assert marked == [2, 3]


async def test_what_is_erased_may_be_replayed_now(store: Store) -> None:
    ids = await store.write(fill, 3)
    await store.write(samples.claim, ids[:1])
    await store.write(adapters.publish, make_version(1), consumed=ids[:1], trained_on=ids[:1])
    assert (await store.write(adapters.taint, ids[:1]))[1] == frozenset()
    await store.write(samples.claim, ids[1:2])
    assert (await store.write(adapters.taint, ids[:1]))[1] == {"formal"}
    assert (await store.write(adapters.taint, ids[2:]))[1] == frozenset()  # nothing trains on it
    await store.write(samples.claim, ids[2:])
    await store.write(samples.invalidate, {ids[2]: "superseded"})
    assert (await store.write(adapters.taint, ids[2:]))[1] == {"formal"}  # chosen before
    await store.write(samples.add, [make_sample("empty", state=SampleState.INVALID)])
    assert (await store.write(adapters.taint, ["empty"]))[1] == frozenset()


async def test_versions_of_erased_samples_and_tainted_parents_are_tainted(store: Store) -> None:
    ids = await store.write(fill, 1)
    assert not (await store.write(adapters.save_version, make_version(1), ids)).tainted
    assert (await store.write(adapters.save_version, make_version(2), [*ids, "gone"])).tainted
    assert (await store.write(adapters.save_version, make_version(3), ids)).tainted
    assert (await store.write(adapters.publish, make_version(2))).tainted


async def test_an_import_has_learned_nothing_from_what_it_took_the_place_of(store: Store) -> None:
    ids = await store.write(fill, 2)
    await store.write(adapters.publish, make_version(1), trained_on=ids[:1])
    await store.write(adapters.publish, make_version(2), trained_on=ids[1:])
    await store.write(adapters.publish, make_version(3, origin=IMPORTED))
    await store.write(adapters.publish, make_version(4))
    tainted, _ = await store.write(adapters.taint, ids)
    assert tainted == (("formal", 1), ("formal", 2))
    await store.write(adapters.delete_version, "formal", 2)
    again = make_version(5, parent=1, origin=IMPORTED)
    assert not (await store.write(adapters.publish, again)).tainted
    kept = await store.read(adapters.versions, "formal")
    found = [(record.number, record.parent, record.tainted) for record in kept]
    assert found == [(1, 0, True), (3, 1, False), (4, 3, False), (5, 1, False)]
    assert await store.read(adapters.trained_on, "formal", 3) == []


async def test_deleting_an_adapter_keeps_its_samples(store: Store) -> None:
    ids = await store.write(fill, 1)
    await store.write(adapters.publish, make_version(1), trained_on=ids)
    gone = await store.write(adapters.delete, "formal")
    assert [record.path for record in gone] == ["/versions/1"]
    assert await store.read(adapters.versions) == []
    assert len(await store.read(samples.get, ids)) == 1
    assert await store.read(samples.counts) == {}
    with pytest.raises(NotFound):
        await store.write(adapters.delete, "formal")


async def test_a_name_that_is_made_again_goes_on_with_its_numbers(store: Store) -> None:
    for expected in (1, 2, 3):
        await store.write(adapters.create, AdapterRecord("formal", 1.0))
        assert await store.write(adapters.allocate, "formal") == expected
        await store.write(adapters.delete, "formal")
    await store.write(adapters.create, AdapterRecord("other", 1.0))
    assert await store.write(adapters.allocate, "other") == 1


async def test_events_are_listed_backwards_in_pages(store: Store) -> None:
    for number in range(5):
        await store.write(events.add, EventRecord("a", float(number), "info", str(number)))
    await store.write(events.add, EventRecord("b", 9.0, "warn", "other"))
    page = await store.read(events.listed, "a", limit=2)
    assert [event.message for event in page] == ["4", "3"]
    rest = await store.read(events.listed, "a", before=page[-1].number)
    assert [event.message for event in rest] == ["2", "1", "0"]
    await store.write(events.forget, "a")
    assert await store.read(events.listed, "a") == []


async def test_versions_that_a_roll_back_has_left(store: Store) -> None:
    await store.write(fill, 0)
    assert await store.read(adapters.left_behind, "formal") == set()
    for number in (1, 2, 3):
        await store.write(adapters.publish, make_version(number))
    await store.write(adapters.refuse, make_version(4))
    assert await store.read(adapters.left_behind, "formal") == set()
    await store.write(adapters.set_current, "formal", 1)
    await store.write(adapters.publish, make_version(5, parent=1))
    assert await store.read(adapters.left_behind, "formal") == {2, 3}
    await store.write(adapters.set_current, "formal", 0)
    assert await store.read(adapters.left_behind, "formal") == {1, 2, 3, 5}
