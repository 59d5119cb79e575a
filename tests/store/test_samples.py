from __future__ import annotations

import asyncio

from records import fill, make_feedback, make_sample, make_version

from tandem.core.learning import AdapterRecord, SampleKind, SampleState, Split
from tandem.store import Store, adapters, feedback, samples


async def states(store: Store, ids: list[str]) -> list[str]:
    return [sample.state.value for sample in await store.read(samples.get, ids)]


async def test_samples_come_back_as_they_went(store: Store) -> None:
    await store.write(fill, 0)
    sample = make_sample("x", loss=0.25, weight=0.5, desirable=False, user="u", key_id="k")
    await store.write(samples.add, [sample])
    assert await store.read(samples.get, ["x"]) == [sample]
    assert await store.read(samples.get, ["gone", "x"]) == [sample]


async def test_heads_are_in_order_of_arrival(store: Store) -> None:
    ids = await store.write(fill, 5)
    heads = await store.read(samples.heads, "formal")
    assert [head.sample_id for head in heads] == ids
    newest = await store.read(samples.heads, "formal", newest_first=True, limit=2)
    assert [head.sample_id for head in newest] == ["s4", "s3"]
    assert await store.read(samples.heads, "other") == []


async def test_dislikes_that_wait_keep_nothing_else_out(store: Store) -> None:
    await store.write(fill, 4, kind=SampleKind.KTO, desirable=False)
    await store.write(samples.add, [make_sample("shown", kind=SampleKind.SFT)])
    heads = await store.read(samples.heads, "formal", limit=3)
    assert [head.sample_id for head in heads] == ["shown", "s0", "s1"]


async def test_no_key_keeps_another_out(store: Store) -> None:
    """One key's samples may wait for others without end (`key_share`)."""
    await store.write(fill, 4, key_id="many")
    await store.write(samples.add, [make_sample("late", key_id="few")])
    heads = await store.read(samples.heads, "formal", limit=3, fair=True)
    assert [head.sample_id for head in heads] == ["s0", "s1", "late"]
    heads = await store.read(samples.heads, "formal", limit=3)
    assert [head.sample_id for head in heads] == ["s0", "s1", "s2"]


async def test_a_roll_back_refuses_only_what_the_version_learned_from(store: Store) -> None:
    ids = await store.write(fill, 3)
    await store.write(samples.claim, ids)
    await store.write(adapters.publish, make_version(1), consumed=ids, trained_on=ids[:2])
    change = (samples.change_of_version, "formal", 1)
    assert await store.write(*change, SampleState.CONSUMED, SampleState.REFUSED) == 2
    assert await states(store, ids) == ["refused", "refused", "accepted"]
    assert await store.write(*change, SampleState.REFUSED, SampleState.CONSUMED) == 2
    assert await states(store, ids) == ["consumed", "consumed", "accepted"]


async def test_a_refusal_counts_for_what_was_new_to_it(store: Store) -> None:
    """And not for what it replayed, which may have to be learned again one day."""
    replayed, new = ids = await store.write(fill, 2)
    await store.write(samples.claim, [replayed])
    await store.write(adapters.publish, make_version(1), consumed=[replayed])
    for number in (2, 3):
        await store.write(samples.claim, [new])
        refused = make_version(number, parent=1)
        await store.write(adapters.refuse, refused, consumed=[new], trained_on=ids, tries=3)
    await store.write(
        samples.change_of_version, "formal", 1, SampleState.CONSUMED, SampleState.REFUSED
    )
    heads = await store.read(samples.heads, "formal")
    assert {head.sample_id: head.refusals for head in heads} == {replayed: 0, new: 2}
    await store.write(samples.claim, ids)
    await store.write(adapters.refuse, make_version(4), consumed=ids, trained_on=ids, tries=3)
    assert await states(store, ids) == ["accepted", "refused"]


async def test_a_sample_is_claimed_once(store: Store) -> None:
    ids = await store.write(fill, 40)
    claims = await asyncio.gather(*(store.write(samples.claim, ids[i:]) for i in range(40)))
    claimed = [sample.sample_id for claim in claims for sample in claim]
    assert sorted(claimed) == sorted(ids)
    assert {sample.state for claim in claims for sample in claim} == {SampleState.ASSIGNED}


async def test_held_out_samples_are_not_claimed(store: Store) -> None:
    ids = await store.write(fill, 3, split=Split.HELD_OUT)
    assert await store.write(samples.claim, ids) == []
    assert [s.sample_id for s in await store.read(samples.held_out, "formal")] == ids[::-1]


async def test_release_takes_back_what_was_interrupted(store: Store) -> None:
    ids = await store.write(fill, 4)
    await store.write(samples.claim, ids[:3])
    assert await store.write(samples.release, "other") == 0
    assert await store.write(samples.finish, ids[:1], SampleState.CONSUMED, 1) == 1
    assert await store.write(samples.release) == 2
    assert await states(store, ids) == ["consumed", "accepted", "accepted", "accepted"]


async def test_finishing_needs_an_assignment(store: Store) -> None:
    ids = await store.write(fill, 3)
    await store.write(samples.claim, ids[:2])
    assert await store.write(samples.finish, ids, SampleState.REFUSED, 7) == 2
    assert await store.write(samples.finish, ids, SampleState.CONSUMED, 8) == 0
    found = await store.read(samples.get, ids)
    assert [(sample.state.value, sample.version) for sample in found] == [
        ("refused", 7),
        ("refused", 7),
        ("accepted", None),
    ]


async def test_losses_count_uses(store: Store) -> None:
    ids = await store.write(fill, 2)
    await store.write(samples.record_losses, {ids[0]: 0.7, ids[1]: 0.6})
    await store.write(samples.record_losses, {ids[0]: 0.1, "gone": 0.1})
    found = await store.read(samples.get, ids)
    assert [(sample.loss, sample.uses) for sample in found] == [(0.1, 2), (0.6, 1)]


async def test_unusable_samples_are_put_aside(store: Store) -> None:
    ids = await store.write(fill, 3)
    await store.write(samples.claim, ids[:1])
    problems = dict.fromkeys(ids[:2], "too long")
    assert await store.write(samples.invalidate, problems) == 2
    assert await store.write(samples.invalidate, problems) == 0
    found = await store.read(samples.get, ids)
    assert [(sample.state.value, sample.problem) for sample in found] == [
        ("invalid", "too long"),
        ("invalid", "too long"),
        ("accepted", ""),
    ]


async def test_counts(store: Store) -> None:
    await store.write(fill, 3)
    held = make_sample("h", adapter="other", split=Split.HELD_OUT, feedback_id="f2")
    await store.write(feedback.add, make_feedback("f2", adapter="other"), [held])
    await store.write(adapters.create, AdapterRecord("other", 1.0))
    await store.write(samples.claim, ["s0"])
    assert await store.read(samples.counts) == {
        "formal": {Split.TRAIN: {SampleState.ACCEPTED: 2, SampleState.ASSIGNED: 1}},
        "other": {Split.HELD_OUT: {SampleState.ACCEPTED: 1}},
    }
    await store.write(adapters.delete, "other")
    assert set(await store.read(samples.counts)) == {"formal"}


async def test_thousands_of_samples_at_once(store: Store) -> None:
    ids = await store.write(fill, 3000)
    assert len(await store.write(samples.claim, ids)) == 3000
    assert await store.write(samples.finish, ids, SampleState.CONSUMED, 1) == 3000
