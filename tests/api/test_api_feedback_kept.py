"""/v1/feedback over a scripted engine: how it is kept, listed and erased, and who may send it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from feedback_client import ABOUT, TURNS, UNPUBLISHED, complete, play, send, served, told

from fake_engine import FakeEngine
from serving import live, make_app
from tandem.config import LearningConfig, ServerConfig, StoreConfig

KEYS = """
[[keys]]
key = "sk-boss"
admin = true
train = ["*"]
[[keys]]
key = "sk-app"
serve = ["base"]
train = ["formal*"]
feedback_per_hour = 3
samples_cap = 4
[[keys]]
key = "sk-other"
train = ["*"]
[[keys]]
key = "sk-guest"
train = ["formal*"]
"""


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with served(make_app(FakeEngine(play=play), learning=UNPUBLISHED)) as http:
        yield http


def test_lists_filter_and_page(http: httpx.Client) -> None:
    for number in range(5):
        send(
            http, **ABOUT, completion=str(number), rating=True, user="ann" if number % 2 else "bob"
        )
    page = http.get("/feedback", params={"limit": 2}).json()
    assert [item["chosen"] for item in page["data"]] == ["4", "3"] and page["has_more"]
    after = {"limit": 2, "after": page["data"][-1]["id"], "user": "bob"}
    rest = http.get("/feedback", params=after).json()
    assert [item["chosen"] for item in rest["data"]] == ["2", "0"] and not rest["has_more"]
    assert http.get("/feedback", params={"adapter": "other"}).json()["data"] == []
    assert http.get("/feedback", params={"state": "lost"}).status_code == 400
    assert http.get("/feedback/unknown").status_code == 404


def test_erasure(http: httpx.Client) -> None:
    answer = complete(http, user="ann")
    one = send(http, completion_id=answer["id"], rating=True, adapter="formal")
    kept = send(http, **ABOUT, completion="x", rating=True, user="bob")
    erased = http.delete("/feedback", params={"user": "ann"}).json()
    assert (erased["feedback"], erased["samples"], erased["receipts"]) == (1, 1, 1)
    assert http.get(f"/feedback/{one['id']}").status_code == 404
    send(http, 404, completion_id=answer["id"], rating=True, adapter="formal")
    gone = http.delete(f"/feedback/{kept['id']}").json()
    assert gone["deleted"] is True and gone["id"] == kept["id"]
    assert http.delete(f"/feedback/{kept['id']}").status_code == 404
    assert http.delete("/feedback").status_code == 400


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("user=&adapter=formal", "user"),
        ("user=%20&adapter=formal", "user"),
        ("user=ann&adapter=", "adapter"),
        ("usr=ann&adapter=formal", "usr"),
        ("user=ann&user=bob", "user"),
        ("user=ann&limit=1", "limit"),
    ],
)
def test_what_shall_be_erased_is_said_exactly(http: httpx.Client, query: str, param: str) -> None:
    kept = send(http, **ABOUT, completion="x", rating=True, user="bob")
    refused = http.delete(f"/feedback?{query}")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    assert http.get(f"/feedback/{kept['id']}").status_code == 200
    assert http.get(f"/feedback?{query.replace('limit=', 'most=')}").status_code == 400


def test_no_state_narrows_what_is_erased(http: httpx.Client) -> None:
    """Receipts have none: all those of the user would be erased."""
    kept = send(http, **ABOUT, completion="x", rating=True, user="ann")
    refused = http.delete("/feedback?user=ann&state=accepted")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "state"
    assert http.get(f"/feedback/{kept['id']}").status_code == 200


def test_receipts_of_a_user_are_erased_by_the_adapter_that_was_asked(http: httpx.Client) -> None:
    http.post("/adapters/formal", json={"settings": {}}).raise_for_status()
    asked = complete(http, model="demo:formal", user="ann")
    complete(http, user="ann")
    erased = http.delete("/feedback", params={"user": "ann", "adapter": "formal"}).json()
    assert erased["receipts"] == 1
    send(http, 404, completion_id=asked["id"], rating=True)


def test_erased_text_is_in_no_file(tmp_path: Path) -> None:
    store = StoreConfig(directory=str(tmp_path))
    with served(make_app(FakeEngine(play=play), store=store, learning=UNPUBLISHED)) as http:
        asked = [{"role": "user", "content": "My telephone number is 494130."}]
        answer = complete(http, messages=asked, user="ann")
        send(http, completion_id=answer["id"], rating=True, adapter="formal")
        files = list(tmp_path.glob("tandem.db*"))
        assert any(b"494130" in file.read_bytes() for file in files)
        assert http.delete("/feedback", params={"user": "ann"}).json()["receipts"] == 1
        assert not any(b"494130" in file.read_bytes() for file in tmp_path.glob("tandem.db*"))


def test_a_key_does_what_it_may(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    app = make_app(
        FakeEngine(play=play), ServerConfig(api_key_file=str(file)), learning=UNPUBLISHED
    )
    with live(app) as url:

        def client(key: str) -> httpx.Client:
            return httpx.Client(base_url=f"{url}/v1", headers={"authorization": f"Bearer {key}"})

        with (
            client("sk-app") as app_http,
            client("sk-boss") as boss,
            client("sk-other") as other,
            client("sk-guest") as guest,
        ):
            answer = complete(app_http)
            refused = send(app_http, 403, completion_id=answer["id"], rating=True, adapter="x")
            assert refused["error"]["type"] == "permission_error"
            first = send(app_http, completion_id=answer["id"], rating=True, adapter="formal")
            send(other, 404, completion_id=answer["id"], rating=True, adapter="formal")
            assert other.get(f"/feedback/{first['id']}").status_code == 404
            assert other.delete(f"/feedback/{first['id']}").status_code == 404
            assert other.get("/feedback", params={"keys": "all"}).status_code == 403
            assert boss.get("/feedback").json()["data"] == []
            assert len(boss.get("/feedback", params={"keys": "all"}).json()["data"]) == 1
            shown = {**ABOUT, "completion": "x", "demonstration": "y"}
            send(app_http, **shown)
            over = app_http.post("/feedback", json=shown)  # 1 + 2 + 2 samples are more than 4
            assert over.status_code == 429 and over.headers["retry-after"]
            send(app_http, **ABOUT, completion="x", rating=True)
            hourly = send(app_http, 429, **ABOUT, completion="x", rating=True)
            assert "an hour" in hourly["error"]["message"]
            app_http.post("/adapters/formal", json={"settings": {}})
            talk = {"model": "demo:formal", "messages": TURNS}
            assert app_http.post("/chat/completions", json=talk).status_code == 403
            assert other.post("/chat/completions", json=talk).status_code == 200
            for name in ("formal", "secret"):
                boss.post(f"/adapters/{name}", json={"settings": {}}).raise_for_status()
            may = complete(guest, model="demo:formal")
            send(guest, completion_id=may["id"], rating=True)
            may_not = complete(guest, model="demo:secret")  # asked of, and not trained
            refused = send(guest, 403, completion_id=may_not["id"], rating=True)
            assert "may not train the adapter 'secret'" in refused["error"]["message"]


def test_what_is_switched_off_says_so() -> None:
    store = LearningConfig(auto_adapters=False)
    with served(make_app(FakeEngine(), learning=store)) as http:
        missing = send(http, 404, **ABOUT, completion="x", rating=True)
        assert "auto_adapters" in missing["error"]["message"]
        http.post("/adapters/formal", json={"settings": {}}).raise_for_status()
        send(http, **ABOUT, completion="x", rating=True)
    with served(make_app(FakeEngine(), learning=LearningConfig(enabled=False))) as http:
        off = send(http, 400, **ABOUT, completion="x", rating=True)
        assert off["error"]["code"] == "learning_disabled"


def test_without_receipts_feedback_brings_its_messages(tmp_path: Path) -> None:
    store = StoreConfig(directory=str(tmp_path), receipt_days=0)
    with served(make_app(FakeEngine(play=play), store=store, learning=UNPUBLISHED)) as http:
        answer = complete(http)
        refused = send(http, 400, completion_id=answer["id"], rating=True, adapter="formal")
        assert "receipt_days" in refused["error"]["message"]
        body = {"model": "demo", "messages": TURNS, "store": True}
        assert http.post("/chat/completions", json=body).status_code == 400
        send(http, **ABOUT, completion="x", rating=True)


def test_feedback_survives_a_restart(tmp_path: Path) -> None:
    store = StoreConfig(directory=str(tmp_path))
    with served(make_app(FakeEngine(play=play), store=store, learning=UNPUBLISHED)) as http:
        answer = complete(http)
        said = send(http, **ABOUT, completion="x", rating=True)
    with served(make_app(FakeEngine(play=play), store=store, learning=UNPUBLISHED)) as http:
        assert told(http.get(f"/feedback/{said['id']}").json()) == told(said)
        send(http, completion_id=answer["id"], rating=True, adapter="formal")
