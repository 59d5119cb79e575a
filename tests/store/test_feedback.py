from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import sqlalchemy as sa
from records import MESSAGES, fill, make_feedback, make_sample, make_version

from tandem.core.errors import StoreError
from tandem.core.learning import (
    AdapterRecord,
    AnswerTokens,
    Ending,
    PromptTokens,
    Receipt,
    ReceiptChoice,
    SampleState,
    ServedTokens,
)
from tandem.store import Connection, Store, adapters, feedback, receipts, samples
from tandem.store.feedback import Erased, Filter
from tandem.store.tables import RECEIPTS, SAMPLES


def make_receipt(name: str, **fields: object) -> Receipt:
    choices = (ReceiptChoice(0, "an answer\u0000", "stop"), ReceiptChoice(1, "", "length"))
    plain = Receipt(name, 1.0, "tenant", None, "base", MESSAGES, "", choices, {"seed": 1})
    return replace(plain, **fields)


async def test_feedback_comes_back_as_it_went(store: Store) -> None:
    said = make_feedback("f1", rating=0.25, comment="hm\u0000", user="u", key_id="k")
    made = [make_sample("s1"), make_sample("s2", state=SampleState.INVALID, problem="long")]
    await store.write(feedback.add, said, made, idempotency_key="once", digest="d")
    stored = feedback.Stored(said, tuple(made), "d")
    assert await store.read(feedback.find, "f1") == stored
    assert await store.read(feedback.find_by_key, "k", "once") == stored
    assert await store.read(feedback.find_by_key, "other", "once") is None
    assert await store.read(feedback.find, "f2") is None


async def test_what_was_served_is_kept_with_the_sample(store: Store) -> None:
    served = ServedTokens("t", (1, 2), rejected=AnswerTokens((3, 100_000), Ending.STOP_TEXT))
    made = [make_sample("s1", served=served), make_sample("s2")]
    await store.write(feedback.add, make_feedback("f1"), made)
    assert await store.read(samples.get, ["s1", "s2"]) == made


async def test_rows_of_an_older_tandem_have_no_token_ids(store: Store) -> None:
    await store.write(receipts.add, make_receipt("c1"))
    await store.write(feedback.add, make_feedback("f1"), [make_sample("s1")])

    def forget(connection: Connection) -> None:
        choices = [{"index": 0, "text": "an answer", "finish_reason": "stop", "prompt": ""}]
        connection.execute(sa.update(RECEIPTS).values(choices=choices, prompt_tokens=sa.null()))
        connection.execute(sa.update(SAMPLES).values(served=sa.null()))

    await store.write(forget)
    receipt = await store.read(receipts.find, "c1")
    assert receipt is not None
    assert receipt.choices == (ReceiptChoice(0, "an answer", "stop"),)
    assert receipt.prompt_tokens is None
    assert await store.read(samples.get, ["s1"]) == [make_sample("s1")]


async def test_what_is_superseded_is_not_learned_from_again(store: Store) -> None:
    """Also where it is being learned from; what a version has learned stays learned, but is not
    replayed."""
    await store.write(adapters.create, AdapterRecord("formal", 1.0))
    made = [make_sample(f"s{number}") for number in range(3)]
    await store.write(feedback.add, make_feedback("f1"), made, same="x")
    await store.write(samples.claim, ["s1", "s2"])
    await store.write(samples.finish, ["s2"], SampleState.CONSUMED, 1)
    later = [make_sample("t", feedback_id="f2")]
    await store.write(feedback.add, make_feedback("f2"), later, same="x")
    await store.write(feedback.add, make_feedback("f3"), [make_sample("u", feedback_id="f3")])
    await store.write(samples.finish, ["s1"], SampleState.CONSUMED, 2)
    await store.write(samples.release)
    found = await store.read(samples.get, ["s0", "s1", "s2", "t", "u"])
    assert [sample.state.value for sample in found] == [
        "invalid",
        "invalid",
        "consumed",
        "accepted",
        "accepted",
    ]
    assert found[1].problem == "superseded by f2"
    first = await store.read(feedback.find, "f1")
    assert first is not None and first.feedback.superseded_by == "f2"
    await store.write(samples.claim, ["t", "u"])
    await store.write(samples.finish, ["t", "u"], SampleState.CONSUMED, 3)
    replayed = await store.read(samples.heads, "formal", SampleState.CONSUMED)
    assert [head.sample_id for head in replayed] == ["t", "u"]


async def test_what_is_superseded_does_not_come_back_with_a_roll_back(store: Store) -> None:
    """What the version learned from is refused; what it only knew would be learned again."""
    await store.write(adapters.create, AdapterRecord("formal", 1.0))
    made = [make_sample("learned"), make_sample("known")]
    await store.write(feedback.add, make_feedback("f1"), made, same="x")
    ids = ["learned", "known"]
    await store.write(samples.claim, ids)
    await store.write(adapters.publish, make_version(1), consumed=ids, trained_on=ids[:1])
    await store.write(feedback.add, make_feedback("f2"), [], same="x")
    change = (samples.change_of_version, "formal", 1)
    assert await store.write(*change, SampleState.CONSUMED, SampleState.REFUSED) == 1
    found = await store.read(samples.get, ids)
    assert [sample.state.value for sample in found] == ["refused", "invalid"]


async def test_an_id_and_a_key_are_used_once(store: Store) -> None:
    def add(name: str, key: str | None) -> asyncio.Future[None]:
        return asyncio.ensure_future(
            store.write(feedback.add, make_feedback(name), [], idempotency_key=key)
        )

    await add("f1", "once")
    with pytest.raises(StoreError):
        await add("f1", None)
    with pytest.raises(StoreError):
        await add("f2", "once")
    await add("f3", None)
    await add("f4", None)


async def test_listing_filters_and_pages(store: Store) -> None:
    for index in range(6):
        said = make_feedback(f"f{index}", user="ann" if index % 2 else "bob", key_id="k")
        made = [make_sample(f"s{index}", feedback_id=f"f{index}")]
        await store.write(feedback.add, said, made)
    await store.write(feedback.add, make_feedback("g", adapter="other", key_id="j"), [])
    await store.write(samples.claim, ["s1", "s2"])

    async def ids(which: Filter, after: str | None = None, limit: int = 20) -> list[str]:
        found = await store.read(feedback.listed, which, after=after, limit=limit)
        return [stored.feedback.feedback_id for stored in found]

    assert await ids(Filter(), limit=3) == ["g", "f5", "f4"]
    assert await ids(Filter(), after="f4", limit=2) == ["f3", "f2"]
    assert await ids(Filter(adapter="other")) == ["g"]
    assert await ids(Filter(user="ann", key_id="k")) == ["f5", "f3", "f1"]
    assert await ids(Filter(user="ann", key_id="j")) == []
    assert await ids(Filter(state="assigned")) == ["f2", "f1"]
    assert await ids(Filter(), after="unknown") == []


async def test_receipts(store: Store) -> None:
    receipt = make_receipt("c1", user="u")
    await store.write(receipts.add, receipt)
    assert await store.read(receipts.find, "c1") == receipt
    assert await store.read(receipts.find, "c2") is None
    choice = ReceiptChoice(0, "an", "length", tokens=AnswerTokens((5, 2**31), Ending.LENGTH))
    served = make_receipt("c3", choices=(choice,), prompt_tokens=PromptTokens("t", ((1,), (2, 3))))
    await store.write(receipts.add, served)
    assert await store.read(receipts.find, "c3") == served
    for index in range(5):
        await store.write(receipts.add, make_receipt(f"old{index}", created_s=0.1 * index))
    assert await store.write(receipts.delete_before, 1.0, 3) == 3
    assert await store.write(receipts.delete_before, 1.0, 3) == 2
    assert await store.write(receipts.delete_before, 1.0, 3) == 0
    assert await store.read(receipts.find, "c1") == receipt


async def test_erasing_one_leaves_the_others(store: Store) -> None:
    await store.write(receipts.add, make_receipt("c1"))
    await store.write(feedback.add, make_feedback("f0", completion_id="c1"), [])
    ids = await store.write(fill, 2)
    await store.write(adapters.publish, make_version(1), trained_on=ids[:1])
    await store.write(samples.claim, ids[1:])
    assert await store.write(feedback.erase, Filter(), feedback_id="f0") == Erased(1, 0, 1)
    erased = await store.write(feedback.erase, Filter(), feedback_id="f1")
    assert erased == Erased(1, 2, 0, (("formal", 1),), frozenset({"formal"}))
    assert await store.read(samples.get, ids) == []
    assert (await store.read(adapters.version, "formal", 1)).tainted
    assert await store.write(feedback.erase, Filter(), feedback_id="f1") == Erased()


async def test_erasing_a_user_takes_their_receipts(store: Store) -> None:
    for name, user, tenant in (("c1", "ann", "k"), ("c2", "bob", "k"), ("c3", "ann", "j")):
        await store.write(receipts.add, make_receipt(name, user=user, tenant=tenant))
    await store.write(feedback.add, make_feedback("f1", user="ann", key_id="k"), [])
    await store.write(feedback.add, make_feedback("f2", user="ann", key_id="j"), [])
    erased = await store.write(feedback.erase, Filter(user="ann", key_id="k"))
    assert erased == Erased(feedback=1, receipts=1)
    left = [name for name in ("c1", "c2", "c3") if await store.read(receipts.find, name)]
    assert left == ["c2", "c3"]
    assert await store.read(feedback.find, "f2") is not None
