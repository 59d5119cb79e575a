"""What a key may not see or do is not there: no route tells it of adapters of others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fake_engine import FakeEngine
from patience import eventually
from serving import live, make_app
from tandem.config import ServerConfig

KEYS = """
[[keys]]
key = "sk-app"
serve = ["base", "formal*"]
[[keys]]
key = "sk-teacher"
serve = []
train = ["poems"]
[[keys]]
key = "sk-reader"
serve = ["formal"]
[[keys]]
key = "sk-boss"
serve = []
train = ["*"]
admin = true
"""
ADAPTERS = ("formal", "poems", "secret")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    with live(make_app(FakeEngine(), ServerConfig(api_key_file=str(file)))) as url:
        with client(url, "sk-boss") as boss:
            for name in ADAPTERS:
                boss.post(f"/v1/adapters/{name}", json={"settings": {}}).raise_for_status()
        yield url


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"x-api-key": key})


@pytest.mark.parametrize(
    ("key", "seen", "base"),
    [
        ("sk-app", ["formal"], True),
        ("sk-teacher", ["poems"], True),  # where a first version begins
        ("sk-reader", ["formal"], False),
        ("sk-boss", [*ADAPTERS], True),
    ],
)
def test_lists_have_what_the_key_may_see(url: str, key: str, seen: list[str], base: bool) -> None:
    with client(url, key) as http:
        models = ["demo"] * base + [f"demo:{name}" for name in seen]
        assert [each["id"] for each in http.get("/v1/models").json()["data"]] == models
        assert [each["id"] for each in http.get("/v1/adapters").json()["data"]] == seen
        assert (http.get("/v1/models/demo").status_code == 200) is base
        for name in (*ADAPTERS, "nothing"):
            answers = [
                http.get(f"/v1/{route}")
                for route in (
                    f"models/demo:{name}",
                    f"adapters/{name}",
                    f"adapters/{name}/versions",
                    f"adapters/{name}/events",
                )
            ]
            expected = 200 if name in seen else 404
            assert [each.status_code for each in answers] == [expected] * 4, name
            for hidden in set(ADAPTERS) - {*seen, name}:
                assert not any(hidden in each.text for each in answers)


@pytest.mark.parametrize("hidden", ["secret", "nothing"])
def test_what_is_hidden_is_refused_as_what_does_not_exist(url: str, hidden: str) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    model = f"demo:{hidden}"
    asked = {
        "/v1/chat/completions": {"model": model, "messages": turns},
        "/v1/completions": {"model": model, "prompt": "x"},
        "/v1/responses": {"model": model, "input": "x"},
        "/v1/messages": {"model": model, "messages": turns, "max_tokens": 4},
        "/tokenize": {"model": model, "prompt": "x"},
        "/detokenize": {"model": model, "tokens": [1]},
        "/v1/fine_tuning/jobs": {"model": model, "training_file": "file-x"},
    }
    with client(url, "sk-app") as http:
        for route, body in asked.items():
            answer = http.post(route, json=body)
            assert answer.status_code == 404, (route, answer.text)
            said = answer.json()["error"]["message"]
            assert said == (
                f"the model '{model}' does not exist; this server knows: demo, demo:formal"
            )


def test_a_key_that_may_see_an_adapter_and_not_ask_it_is_told_so(url: str) -> None:
    body = {"model": "demo:poems", "prompt": "x"}
    with client(url, "sk-teacher") as http:
        answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 403 and "may not use" in answer.json()["error"]["message"]


def test_metrics_leave_out_what_a_key_may_not_see(url: str) -> None:
    with client(url, "sk-boss") as boss, client(url, "sk-app") as app:
        for name in ADAPTERS:
            said = {"prompt": "Hi", "completion": "Hello", "rating": True, "adapter": name}
            boss.post("/v1/feedback", json=said).raise_for_status()
        eventually(lambda: all(f'adapter="{n}"' in boss.get("/metrics").text for n in ADAPTERS))
        own = app.get("/metrics").text
    assert 'adapter="formal"' in own and "secret" not in own and "poems" not in own
    assert "tandem_engine_up 1.0" in own and "tandem_http_requests_total" in own
