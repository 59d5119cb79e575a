"""/v1/models, /v1/adapters, /tokenize, /detokenize, /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from fake_engine import FakeEngine
from serving import live, make_app
from tandem.config import AdapterConfig, LearningConfig


@pytest.fixture
def http(tmp_path: Path) -> Iterator[httpx.Client]:
    (tmp_path / "formal").mkdir()
    (tmp_path / "broken").mkdir()
    adapters = AdapterConfig(roots=(str(tmp_path),))
    app = make_app(FakeEngine(), adapters=adapters)
    with live(app) as url, httpx.Client(base_url=url) as http:
        yield http


def test_the_life_of_an_adapter(http: httpx.Client) -> None:
    loaded = http.post("/v1/adapters/formal/load", json={"path": "formal"})
    assert loaded.status_code == 200
    assert loaded.json()["label"] == "formal@1" and loaded.json()["model"] == "demo:formal"
    assert http.post("/v1/adapters/formal/load").json()["version"] == 2
    assert [a["label"] for a in http.get("/v1/adapters").json()["data"]] == ["formal@2"]
    model = http.get("/v1/models/demo:formal").json()
    assert (model["parent"], model["adapter"]) == ("demo", "formal@2")
    body = {"model": "demo:formal", "prompt": "x"}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["x-tandem-adapter"] == "formal@2"
    assert http.delete("/v1/adapters/formal").json()["deleted"] is True
    assert http.delete("/v1/adapters/formal").status_code == 404
    assert http.post("/v1/completions", json=body).status_code == 404
    assert http.get("/v1/models/demo:formal").status_code == 404


@pytest.mark.parametrize(
    ("name", "body", "param"),
    [
        ("formal", {"path": "/etc"}, "path"),
        ("formal", {"path": "../.."}, "path"),
        ("formal", {"path": 5}, "path"),
        ("formal", {"path": "formal", "extra": 1}, "extra"),
        ("a b", {"path": "formal"}, "name"),
        ("..%2Fformal", {"path": "formal"}, None),
        ("broken", {"path": "broken"}, None),
    ],
)
def test_what_cannot_be_loaded(
    http: httpx.Client, name: str, body: dict[str, object], param: str | None
) -> None:
    response = http.post(f"/v1/adapters/{name}/load", json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param
    assert http.get("/v1/adapters").json()["data"] == []


def test_the_official_client_lists_models(http: httpx.Client) -> None:
    http.post("/v1/adapters/formal/load")
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["demo", "demo:formal"]
        assert client.models.retrieve("demo").owned_by == "tandem"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")


@pytest.mark.parametrize(
    ("model", "learning", "told"),
    [
        ("demo:new", LearningConfig(), True),
        ("demo:new", LearningConfig(auto_adapters=False), False),
        ("demo:new", LearningConfig(enabled=False), False),
        ("demo:a b", LearningConfig(), False),
        ("demo:base", LearningConfig(), False),
        ("demo:", LearningConfig(), False),
        ("demo:new:0a1b2c3d:ckpt-step-4", LearningConfig(), False),
        ("other:new", LearningConfig(), False),
        ("new", LearningConfig(), False),
    ],
)
def test_an_adapter_that_feedback_would_make_is_told(
    model: str, learning: LearningConfig, told: bool
) -> None:
    with live(make_app(FakeEngine(), learning=learning)) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "x"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "model_not_found")
    hint = " (its first feedback makes it; until then ask for 'demo')"
    assert error["message"].endswith(hint) is told
    assert error["message"].startswith(f"the model '{model}' does not exist; this server knows:")


def test_tokens_there_and_back(http: httpx.Client) -> None:
    text = "Hello €"
    tokenized = http.post("/tokenize", json={"model": "demo", "prompt": text}).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == 256
    back = http.post("/detokenize", json={"tokens": tokenized["tokens"]})
    assert back.json() == {"prompt": text}
    turns = [{"role": "user", "content": "Hi"}]
    with_opening = http.post("/tokenize", json={"messages": turns}).json()["count"]
    body = {"messages": turns, "add_generation_prompt": False}
    assert http.post("/tokenize", json=body).json()["count"] < with_opening


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {"tokens": [99999]}, 400),
        ("/detokenize", {"tokens": "x"}, 400),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404),
    ],
)
def test_bad_token_requests(
    http: httpx.Client, route: str, body: dict[str, object], status: int
) -> None:
    response = http.post(route, json=body)
    assert response.status_code == status
    assert "error" in response.json()


def test_metrics_count_requests_and_errors(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"model": "demo", "prompt": "x"})
    http.post("/v1/completions", json={"model": "demo"})
    http.get("/no/such/route")
    text = http.get("/metrics").text
    route = 'method="POST",route="/v1/completions"'
    assert f'tandem_http_requests_total{{{route},status="200"}} 1.0' in text
    assert f'tandem_http_requests_total{{{route},status="400"}} 1.0' in text
    assert 'tandem_http_requests_total{method="GET",route="unknown",status="404"} 1.0' in text
    assert 'tandem_http_errors_total{status="400"} 1.0' in text
    assert "tandem_time_to_first_token_seconds_count 1.0" in text
    assert "tandem_request_queue_time_seconds_sum 0.5" in text
    assert "tandem_engine_up 1.0" in text
    assert "tandem_kv_cache_usage_perc 0.25" in text
