"""/v1/feedback over a scripted engine: what may be said, about what, and what becomes of it."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from feedback_client import ABOUT, TURNS, UNPUBLISHED, complete, kinds, play, send, served, told

from fake_engine import FakeEngine
from serving import make_app
from tandem.config import LearningConfig, ModelConfig, StoreConfig
from tandem.services.answering.receipts import Receipts
from tandem.services.feedback import service
from tandem.services.feedback.subject import Ask, Subject
from tandem.store import receipts as rows

JSON = {"content-type": "application/json"}


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with served(make_app(FakeEngine(play=play), learning=UNPUBLISHED)) as http:
        yield http


@pytest.mark.parametrize(
    ("said", "made"),
    [
        ({"rating": True}, [("kto", 1.0)]),
        ({"rating": False}, [("kto", 1.0)]),
        ({"rating": 0.75}, [("kto", 0.5)]),
        ({"rating": 0.5}, []),
        ({"rating": 0.0, "weight": 2}, [("kto", 2.0)]),
        ({"demonstration": "Very well."}, [("sft", 1.0), ("dpo", 1.0)]),
        ({"comment": "too curt"}, []),
        ({"preference": {"chosen": "Very well.", "rejected": "What?"}}, [("dpo", 1.0)]),
        ({"signal": {"type": "skip"}}, [("kto", 0.1)]),
        ({"signal": {"type": "edit", "text": "Very well."}}, [("sft", 0.5), ("dpo", 0.5)]),
        ({"signal": {"type": "dwell_time", "seconds": 0.6}}, []),
    ],
)
def test_each_kind_makes_its_samples(
    http: httpx.Client, said: dict[str, Any], made: list[tuple[str, float]]
) -> None:
    feedback = send(http, **ABOUT, completion="Fine, thank you.", **said)
    assert kinds(feedback) == made
    assert {sample["state"] for sample in feedback["samples"]} <= {"accepted"}
    assert told(http.get(f"/feedback/{feedback['id']}").json()) == told(feedback)
    assert feedback["model"] == "demo:formal"


def test_a_served_name_may_have_a_colon() -> None:
    own = ModelConfig(served_name="llama3:8b")
    with served(make_app(FakeEngine(play=play), model=own, learning=UNPUBLISHED)) as http:
        given = {"messages": TURNS, "completion": "Fine.", "rating": True}
        assert send(http, **given, model="llama3:8b:formal")["adapter"] == "formal"
        assert send(http, **given, model="llama3:8b", adapter="formal")["adapter"] == "formal"
        for other in ("llama3:formal", "llama3", "llama3:8bx:formal"):
            assert send(http, 404, **given, model=other)["error"]["code"] == "model_not_found"


def test_a_rating_says_which_side(http: httpx.Client) -> None:
    good = send(http, **ABOUT, completion="Fine.", rating=0.9)["samples"][0]
    bad = send(http, **ABOUT, completion="Fine.", rating=False)["samples"][0]
    assert (good["desirable"], bad["desirable"]) == (True, False)


def test_feedback_by_receipt_knows_what_was_said(http: httpx.Client) -> None:
    answer = complete(http, user="ann")
    feedback = send(http, completion_id=answer["id"], rating=True, adapter="formal")
    assert feedback["messages"] == TURNS and feedback["chosen"] == "Fine, thank you."
    assert (feedback["user"], feedback["version"]) == ("ann", "base")


@pytest.mark.parametrize("how", ["never learned", "rolled back"])
def test_a_receipt_names_the_adapter_for_which_the_base_answered(
    http: httpx.Client, tmp_path: Path, how: str
) -> None:
    http.post("/adapters/formal", json={"settings": {}}).raise_for_status()
    if how == "rolled back":
        archive = tmp_path / "formal.zip"
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr("adapter_config.json", "{}")
            packed.writestr("adapter_model.safetensors", b"weights")
        sent = http.post(
            "/files", files={"file": archive.read_bytes()}, data={"purpose": "fine-tune"}
        ).json()
        http.post("/adapters/formal/import", json={"file_id": sent["id"]}).raise_for_status()
        before = complete(http, model="demo:formal")
        assert send(http, completion_id=before["id"], rating=True)["version"] == "formal@1"
        http.post("/adapters/formal/rollback", json={}).raise_for_status()
    chat = complete(http, model="demo:formal")
    said = send(http, completion_id=chat["id"], rating=True)
    assert (said["model"], said["version"], said["messages"]) == ("demo:formal", "base", TURNS)
    plain = http.post("/completions", json={"model": "demo:formal", "prompt": "One"}).json()
    said = send(http, completion_id=plain["id"], rating=False)
    assert (said["model"], said["version"], said["prompt"]) == ("demo:formal", "base", "One")
    other = send(http, completion_id=chat["id"], rating=True, adapter="casual")
    assert other["model"] == "demo:casual"  # who is named still learns instead
    base = complete(http)
    assert (
        "say which adapter"
        in send(http, 400, completion_id=base["id"], rating=True)["error"]["message"]
    )


def test_choices_are_compared_by_index(http: httpx.Client) -> None:
    answer = complete(http, n=2)
    pair = {"chosen": 0, "rejected": 1}
    feedback = send(http, completion_id=answer["id"], preference=pair, model="demo:formal")
    assert (feedback["chosen"], feedback["rejected"]) == ("Fine, thank you.", "What?")
    assert kinds(feedback) == [("dpo", 1.0)]
    twice = send(http, 400, completion_id=answer["id"], choice=1, preference=pair, adapter="a")
    assert twice["error"]["param"] == "choice"
    rated = send(http, completion_id=answer["id"], choice=1, rating=False, adapter="formal")
    assert rated["chosen"] == "What?"
    send(http, 400, completion_id=answer["id"], rating=False, adapter="formal")
    send(http, 400, completion_id=answer["id"], choice=2, rating=False, adapter="formal")


def test_streams_and_plain_completions_have_receipts_too(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=str(http.base_url), api_key="none") as client:
        chunks = list(client.chat.completions.create(model="demo", messages=TURNS, stream=True))
        ours: Any = {"completion_id": chunks[0].id, "rating": True, "adapter": "formal"}
        assert client.post("/feedback", body=ours, cast_to=object)["chosen"] == "Fine, thank you."
        prompts = ["One", "Two"]
        done = client.completions.create(model="demo", prompt=prompts, n=2, echo=True)
    feedback = send(http, completion_id=done.id, choice=3, rating=False, adapter="formal")
    assert (feedback["prompt"], feedback["chosen"]) == ("Two", "What?")
    pair = {"chosen": 0, "rejected": 3}
    send(http, 400, completion_id=done.id, preference=pair, adapter="formal")


@pytest.mark.parametrize(
    "said",
    [
        {"preference": {"chosen": "Very well.", "rejected": "What?"}},
        {"demonstration": "Very well."},
        {"rating": True},
        {"signal": {"type": "skip"}},
    ],
)
def test_of_several_prompts_one_must_be_meant(http: httpx.Client, said: dict[str, Any]) -> None:
    body = {"model": "demo", "prompt": ["One", "Two"]}
    about = {"completion_id": http.post("/completions", json=body).json()["id"], "adapter": "a"}
    refused = send(http, 400, **about, **said)["error"]
    assert refused["param"] == "choice" and "has 2 choices; say which one" in refused["message"]
    assert send(http, **about, choice=1, **said)["prompt"] == "Two"
    assert send(http, **about, choice=0, **said)["prompt"] == "One"


def test_one_prompt_with_several_answers_may_be_shown_a_better_one(http: httpx.Client) -> None:
    body = {"model": "demo", "prompt": "One", "n": 2}
    answer = http.post("/completions", json=body).json()
    shown = send(http, completion_id=answer["id"], demonstration="Very well.", adapter="a")
    assert (shown["prompt"], kinds(shown)) == ("One", [("sft", 1.0)])


def test_a_receipt_that_is_erased_meanwhile_teaches_nothing(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what was erased would be stored again."""
    answer, found = complete(http), service.subject_of

    async def erased(ask: Ask, receipts: Receipts, tenant: str) -> Subject:
        subject = await found(ask, receipts, tenant)
        await receipts._store.write(rows.delete_before, 1e12, 10)
        return subject

    monkeypatch.setattr(service, "subject_of", erased)
    refused = send(http, 404, completion_id=answer["id"], rating=True, adapter="formal")
    assert refused["error"]["code"] == "completion_not_found"
    assert http.get("/feedback").json()["data"] == []


def test_store_false_keeps_no_receipt(http: httpx.Client) -> None:
    answer = complete(http, store=False)
    send(http, 404, completion_id=answer["id"], rating=True, adapter="formal")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {**ABOUT, "completion": "x"},
        {**ABOUT, "completion": "x", "rating": True, "demonstration": "y"},
        {**ABOUT, "rating": True},
        {**ABOUT, "completion": " ", "rating": True},
        {**ABOUT, "completion": "x", "rating": 1.5},
        {**ABOUT, "completion": "x", "rating": "yes"},
        {**ABOUT, "completion": "x", "rating": True, "weight": 0},
        {**ABOUT, "completion": "x", "rating": True, "user": "a\u0000b"},
        {"completion_id": "chatcmpl-\u0000", "rating": True},
        {**ABOUT, "completion": "x", "rating": True, "unknown": 1},
        {**ABOUT, "messages": [{**TURNS[0], "unknown": 1}], "completion": "x", "rating": True},
        {**ABOUT, "messages": [{**TURNS[0], "tool_calls": [1]}], "completion": "x", "rating": 1},
        {"messages": TURNS, "completion": "x", "rating": True, "adapter": "base"},
        {**ABOUT, "completion": "x", "demonstration": "x"},
        {**ABOUT, "preference": {"chosen": "x", "rejected": "x"}},
        {**ABOUT, "preference": {"chosen": "x", "rejected": " "}},
        {**ABOUT, "preference": {"chosen": 0, "rejected": 1}},
        {**ABOUT, "preference": {"chosen": "x"}},
        {**ABOUT, "completion": "x", "signal": {"type": "wink"}},
        {**ABOUT, "completion": "x", "signal": {"type": "edit"}},
        {**ABOUT, "completion": "x", "signal": {"type": "dwell_time"}},
        {"messages": TURNS, "completion": "x", "rating": True},
        {"messages": TURNS, "completion": "x", "rating": True, "model": "demo"},
        {**ABOUT, "completion": "x", "rating": True, "model": "demo:other"},
        {"messages": TURNS, "completion": "x", "rating": True, "adapter": "../x"},
        {**ABOUT, "prompt": "p", "completion": "x", "rating": True},
        {"messages": [{"role": "assistant", "content": "x"}], "rating": True, "adapter": "a"},
    ],
)
def test_what_cannot_be_learned_from_is_refused(http: httpx.Client, body: dict[str, Any]) -> None:
    assert "error" in send(http, 400, **body)
    assert http.get("/feedback").json()["data"] == []


@pytest.mark.parametrize("rating", ["2", "NaN", '"good"', "-0.1", "[]"])
def test_a_wrong_rating_is_told_what_is_right(http: httpx.Client, rating: str) -> None:
    raw = f'{{"prompt": "p", "completion": "x", "adapter": "a", "rating": {rating}}}'
    error = http.post("/feedback", content=raw, headers=JSON).json()["error"]
    assert error["message"] == "'rating': must be true, false or a number from 0 to 1"
    assert error["param"] == "rating"


def test_a_list_that_goes_on_after_nothing_is_404(http: httpx.Client) -> None:
    known = send(http, **ABOUT, completion="x", rating=True)["id"]
    assert http.get("/feedback", params={"after": known}).json()["data"] == []
    missing = http.get("/feedback", params={"after": "unknown"})
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "after"


def test_numbers_that_are_none_are_refused(http: httpx.Client) -> None:
    for number in ("NaN", "Infinity", "1e999"):
        raw = f'{{"prompt": "p", "completion": "x", "adapter": "a", "rating": {number}}}'
        assert http.post("/feedback", content=raw, headers=JSON).status_code == 400
        raw = (
            f'{{"prompt": "p", "completion": "x", "adapter": "a", "rating": 1, "weight": {number}}}'
        )
        assert http.post("/feedback", content=raw, headers=JSON).status_code == 400


def test_too_long_is_stored_but_not_learned_from(http: httpx.Client) -> None:
    feedback = send(http, **ABOUT, completion="long " * 5000, rating=True)
    (sample,) = feedback["samples"]
    assert sample["state"] == "invalid" and "characters are more than" in sample["problem"]
    listed = http.get("/feedback", params={"state": "invalid"}).json()["data"]
    assert [item["id"] for item in listed] == [feedback["id"]]


def test_an_adapter_has_a_limit_of_its_own(http: httpx.Client) -> None:
    said = {"messages": TURNS, "completion": "word " * 20, "rating": True}
    http.post("/adapters/short", json={"settings": {"max_sample_tokens": 12}}).raise_for_status()
    (sample,) = send(http, **said, adapter="short")["samples"]
    assert sample["state"] == "invalid" and "allows (12)" in sample["problem"]
    (sample,) = send(http, **said, adapter="formal")["samples"]
    assert sample["state"] == "accepted"


def test_repeating_gives_the_same_answer(http: httpx.Client) -> None:
    body = {**ABOUT, "completion": "Fine.", "rating": True, "feedback_id": "mine-1"}
    first = send(http, **body)
    assert told(send(http, **dict(reversed(body.items())))) == told(first)
    assert send(http, 409, **{**body, "rating": False})["error"]["code"] == "conflict"
    plain = {**ABOUT, "completion": "Fine.", "rating": True}
    key = {"idempotency-key": "once"}
    one = http.post("/feedback", json=plain, headers=key).json()
    assert told(http.post("/feedback", json=plain, headers=key).json()) == told(one)
    changed = http.post("/feedback", json={**plain, "rating": False}, headers=key)
    assert changed.status_code == 409
    assert len(http.get("/feedback").json()["data"]) == 2


def test_the_split_follows_the_conversation() -> None:
    app = make_app(FakeEngine(), learning=LearningConfig(held_out=0.5, batch_samples=1000))
    with served(app) as http:
        found: dict[str, set[str]] = {}
        for number in range(80):
            talk = f"talk {number % 40}"
            one = send(http, **ABOUT, completion=str(number), rating=True, conversation=talk)
            found.setdefault(talk, set()).add(one["samples"][0]["split"])
    assert all(len(splits) == 1 for splits in found.values())
    assert set.union(*found.values()) == {"train", "held_out"}
    first, later = [list(found.values())[part] for part in (slice(20), slice(20, None))]
    assert set.union(*first) == {"train"} and set.union(*later) == {"train", "held_out"}


def test_what_was_held_out_stays_so_when_less_is(tmp_path: Path) -> None:
    """Else a version would be measured by conversations that it was trained on."""
    found: list[list[str]] = []
    for share in (0.5, 0.0, 0.5):
        learning = LearningConfig(held_out=share, batch_samples=1000)
        store = StoreConfig(directory=str(tmp_path))
        with served(make_app(FakeEngine(), store=store, learning=learning)) as http:
            said = [
                send(http, **ABOUT, completion=f"{share} {n}", rating=True, conversation=str(n))
                for n in range(40)
            ]
        found.append([one["samples"][0]["split"] for one in said])
    assert found[0] == found[1] == found[2] and set(found[0]) == {"train", "held_out"}
