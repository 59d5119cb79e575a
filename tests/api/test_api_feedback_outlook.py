"""The answer to feedback says what becomes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from feedback_client import ABOUT, UNPUBLISHED, send, served

from fake_engine import FakeEngine
from learning_world import CANARY
from patience import eventually
from serving import make_app
from tandem.config import AdapterConfig, LearningConfig, SchedulingConfig
from tandem.core.errors import StoreError
from tandem.services.learning.outlook import Outlook, Outlooks

TWO = AdapterConfig(max_loaded=2)
RATED: dict[str, Any] = {"messages": ABOUT["messages"], "completion": "Fine.", "rating": True}


def told_of(learning: dict[str, Any]) -> tuple[str, str | None]:
    """Its state and note, whatever is said of the next version."""
    return learning["state"], learning["note"]


@pytest.mark.parametrize(
    ("said", "state", "note"),
    [
        ({"rating": True}, "queued", None),
        ({"rating": False}, "waits", "answers that are rated up"),
        ({"rating": 0.5}, "nothing", "neither what is good nor what is bad"),
        ({"comment": "hm"}, "nothing", "neither what is good nor what is bad"),
        ({"rating": True, "completion": "long " * 5000}, "nothing", "are more than"),
    ],
)
def test_what_is_learned_from_and_what_is_not(
    said: dict[str, Any], state: str, note: str | None
) -> None:
    with served(make_app(FakeEngine(), learning=UNPUBLISHED)) as http:
        feedback = send(http, **{**ABOUT, "completion": "Fine.", **said})
        learning = feedback["learning"]
        assert learning["state"] == state and (note or "") in (learning["note"] or "")
        again = http.get(f"/feedback/{feedback['id']}").json()["learning"]
        assert told_of(again) == told_of(learning)
        assert (learning["next"] is not None) == (state == "queued")


def test_a_dislike_waits_for_an_answer_rated_up_and_for_nothing_else() -> None:
    """A demonstration is none; one that is rated up is enough for one."""
    down = {**RATED, "adapter": "a", "rating": False}
    shown = {"adapter": "a", "messages": ABOUT["messages"], "demonstration": "Fine."}
    with served(make_app(FakeEngine(), learning=UNPUBLISHED)) as http:
        send(http, **shown)
        told = [
            send(http, **each, conversation=f"talk {number}")["learning"]["state"]
            for number, each in enumerate((down, {**RATED, "adapter": "a"}, down))
        ]
        first = http.get("/feedback", params={"limit": 100}).json()["data"][-2]
        again = http.get(f"/feedback/{first['id']}").json()["learning"]["state"]
    assert told == ["waits", "queued", "waits"] and again == "queued"


def test_the_next_version_is_foreseen_by_what_it_waits_for() -> None:
    config = LearningConfig(held_out=0.0, batch_samples=4, steps_per_version=2, version_wait_s=60.0)
    with served(make_app(FakeEngine(), learning=config)) as http:
        told = [
            send(http, **RATED, adapter="a", conversation=f"talk {n}")["learning"]["next"]
            for n in range(4)
        ]
    assert [each["samples"] for each in told] == [1, 2, 3, 4]
    assert {(each["enough"], each["most"], each["takes_s"]) for each in told} == {(4, 8, None)}
    assert told[3]["starts_in_s"] <= 15 < told[2]["starts_in_s"] <= 600


def test_samples_of_one_key_wait_for_those_of_others() -> None:
    config = LearningConfig(held_out=0.0, key_share=0.5)
    with served(make_app(FakeEngine(), learning=config)) as http:
        told = send(http, **RATED, adapter="a")["learning"]
    assert told["state"] == "waits" and "more than 50%" in told["note"] and told["next"] is None


def test_what_a_held_version_learned_from_waits_for_a_decision(tmp_path: Path) -> None:
    canary = tmp_path / "canary.jsonl"
    canary.write_text(CANARY)
    config = LearningConfig(
        canary_file=str(canary), held_out=0.0, version_wait_s=0.0, gate="manual"
    )
    with served(make_app(FakeEngine(), learning=config)) as http:
        sent = send(http, **RATED, adapter="a")

        def told() -> str:
            learning = http.get(f"/feedback/{sent['id']}").json()["learning"]
            return str(learning["note"] if learning["state"] == "waits" else "")

        eventually(lambda: "waits for a decision" in told())


def test_a_name_for_which_there_is_no_place_is_told_so() -> None:
    engine = FakeEngine()
    for name in ("one", "two"):
        asyncio.run(engine.load_adapter(name, name))
    with served(make_app(engine, adapters=TWO, learning=UNPUBLISHED)) as http:
        waits = send(http, **RATED, adapter="third")["learning"]
        assert told_of(send(http, **RATED, adapter="one")["learning"]) == ("queued", None)
    assert waits["state"] == "waits"
    assert waits["note"].startswith("2 adapters are loaded, and 'third' would be one more: unload")
    assert waits["note"].endswith("It is kept, and learned from when a place is free")


def test_names_that_learn_already_come_first() -> None:
    with served(make_app(FakeEngine(), adapters=TWO, learning=UNPUBLISHED)) as http:
        told = [
            send(http, **RATED, adapter=name, user=user)["learning"]["state"]
            for user in ("ann", "bob")
            for name in ("a", "b", "c", "d")
        ]
    assert told == ["queued", "queued", "waits", "waits"] * 2


def test_a_policy_that_never_trains_is_told() -> None:
    scheduling = SchedulingConfig(policy="no_retrain")
    with served(make_app(FakeEngine(), scheduling=scheduling, learning=UNPUBLISHED)) as http:
        told = send(http, **RATED, adapter="a")["learning"]
    assert told_of(told) == ("waits", "nothing is trained under this server's policy")


def test_what_is_stored_is_acknowledged_although_its_future_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error would let clients send it again."""

    async def lost(*_: Any) -> Outlook:
        raise StoreError("the connection is gone")

    monkeypatch.setattr(Outlooks, "of", lost)
    with served(make_app(FakeEngine(), learning=UNPUBLISHED)) as http:
        told = send(http, **RATED, adapter="a")
        assert told["learning"] is None and told["samples"]
        assert [each["id"] for each in http.get("/feedback").json()["data"]] == [told["id"]]
        assert http.get(f"/feedback/{told['id']}").status_code == 503


def test_what_is_measured_on_and_what_was_learned_is_told(tmp_path: Path) -> None:
    canary = tmp_path / "canary.jsonl"
    canary.write_text(CANARY)
    config = LearningConfig(
        canary_file=str(canary), held_out=1.0, version_wait_s=0.0, gate="always"
    )
    with served(make_app(FakeEngine(), learning=config)) as http:
        for number in range(21):
            last = send(http, **RATED, adapter="a", conversation=f"talk {number}")
        first = http.get("/feedback", params={"limit": 100}).json()["data"][-1]
        assert last["learning"]["state"] == "held_out"

        def learned() -> bool:
            told: dict[str, Any] = http.get(f"/feedback/{first['id']}").json()["learning"]
            return told["state"] == "learned" and "learned from it" in told["note"]

        eventually(learned)
