"""Dead engines, clients that leave, overload, keys: what the surface does when things go wrong."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from fake_engine import FakeEngine, Script
from patience import eventually
from serving import demo_tokenizer, live, make_app, sent
from tandem.config import ServerConfig
from tandem.core.plan import NO_MEMORY
from tandem.core.ports import EngineState
from tandem.core.sequence import FinishReason

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
LONG = tuple([20] * 200)


def held(free: int = 0) -> FakeEngine:
    """It says nothing after its first tokens."""
    return FakeEngine(play=lambda r, i: Script(tokens=LONG, gate=threading.Event(), free=free))


def test_a_dead_engine_is_told_everywhere() -> None:
    engine = FakeEngine(state=EngineState.DEAD)
    with live(make_app(engine)) as url, httpx.Client(base_url=url) as http:
        for stream in (False, True):
            response = http.post(CHAT, json={**BODY, "stream": stream})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "3"
            assert response.json()["error"]["code"] == "engine_unavailable"
        for route in ("/health", "/ready"):
            assert http.get(route).status_code == 503
            assert "retry-after" in http.get(route).headers
        assert "tandem_engine_up 0.0" in http.get("/metrics").text
        engine.state = EngineState.READY
        assert http.get("/health").status_code == http.head("/ready").status_code == 200
        assert http.post(CHAT, json=BODY).status_code == 200
        engine.state = EngineState.DRAINING
        assert (http.get("/health").status_code, http.get("/ready").status_code) == (200, 503)


def test_a_death_within_a_stream_is_an_event_that_the_official_client_raises() -> None:
    engine = FakeEngine(play=lambda r, i: Script(tokens=LONG, dies_after=3))
    with (
        live(make_app(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        got = 0
        with pytest.raises(openai.APIError, match="restarts"):
            for _ in client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Hi"}], stream=True
            ):
                got += 1
        assert got == 3
        engine.state = EngineState.READY
        text = httpx.post(f"{url}{CHAT}", json={**BODY, "stream": True}).text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "engine_unavailable"


def test_a_death_before_the_first_event_of_a_stream_is_a_status() -> None:
    """The first token may be the beginning of a stop string."""
    [bracket] = demo_tokenizer().encode("(", add_special_tokens=False)
    engine = FakeEngine(play=lambda r, i: Script(tokens=(bracket,) * 2, dies_after=1))
    body = {"model": "demo", "prompt": "x", "stream": True, "stop": ["(zzz"]}
    with live(make_app(engine)) as url:
        response = httpx.post(f"{url}/v1/completions", json=body)
        assert response.status_code == 503 and response.headers["retry-after"] == "3"
        assert len(engine.requests) == 1


def test_a_death_or_failure_without_a_stream_is_a_status() -> None:
    engine = FakeEngine(play=lambda r, i: Script(tokens=LONG, dies_after=3))
    with live(make_app(engine)) as url:
        assert httpx.post(f"{url}{CHAT}", json=BODY).status_code == 503
    engine = FakeEngine(play=lambda r, i: Script(finish=FinishReason.ERROR, error="NaN logits"))
    with live(make_app(engine)) as url:
        response = httpx.post(f"{url}{CHAT}", json=BODY)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "NaN logits"


def test_a_shortage_of_memory_is_no_fault_of_the_request() -> None:
    engine = FakeEngine(play=lambda r, i: Script(finish=FinishReason.ERROR, error=NO_MEMORY))
    with live(make_app(engine)) as url:
        response = httpx.post(f"{url}{CHAT}", json=BODY)
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert response.json()["error"]["code"] == "out_of_memory"


def test_closing_a_stream_aborts() -> None:
    engine = held(free=1)
    with live(make_app(engine)) as url, httpx.Client(base_url=url) as http:
        for count, n in enumerate((1, 3), 1):
            with http.stream("POST", CHAT, json={**BODY, "stream": True, "n": n}) as response:
                lines = response.iter_lines()
                next(lines)
                assert engine.running
            eventually(lambda count=count: len(engine.aborted) == count)  # type: ignore[misc]
            assert not engine.running
        assert [request_id for request_id, _ in engine.aborted] == [
            request.request_id for request in engine.requests
        ]
        text = http.get("/metrics").text
        assert 'tandem_request_success_total{finished_reason="abort"} 4.0' in text


def test_leaving_aborts_an_answer_that_is_not_streamed() -> None:
    engine = held(free=1)
    with live(make_app(engine)) as url:
        leave(url, engine)
        assert len(engine.aborted) == 1


def test_leaving_before_the_first_token_aborts() -> None:
    engine = held()
    with live(make_app(engine)) as url:
        for stream in (False, True):
            leave(url, engine, stream=stream)
        assert len(engine.aborted) == 2


def leave(url: str, engine: FakeEngine, **fields: object) -> None:
    """Ask, and go as soon as the engine has the request; the engine is told."""
    asked, told = len(engine.requests), len(engine.aborted)
    with sent(url, CHAT, BODY | fields):
        eventually(lambda: len(engine.requests) > asked)
    eventually(lambda: len(engine.aborted) > told)
    assert not engine.running


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_overload_sheds_with_retry_after_and_recovers() -> None:
    answers = threading.Event()
    engine = FakeEngine(play=lambda r, i: Script(tokens=(20,), gate=answers))
    with live(make_app(engine, ServerConfig(max_waiting_requests=2))) as url:
        codes: list[int] = []
        workers = [
            in_background(lambda: codes.append(httpx.post(f"{url}{CHAT}", json=BODY).status_code))
            for _ in range(2)
        ]
        eventually(lambda: len(engine.requests) == 2)
        response = httpx.post(f"{url}{CHAT}", json=BODY)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "overloaded"
        threading.Timer(0.2, answers.set).start()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3) as client:
            answer = client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": "Hi"}]
            )  # the official client waits and tries again by itself
        assert answer.choices[0].finish_reason == "stop"
        for worker in workers:
            worker.join()
        assert codes == [200, 200]


def test_a_wait_far_beyond_the_objective_is_refused_and_counted() -> None:
    answers = threading.Event()
    answers.set()
    engine = FakeEngine(play=lambda r, i: Script(tokens=(20,), delay_s=0.03, gate=answers))
    body = {**BODY, "ttft_slo": 0.001}
    with live(make_app(engine, ServerConfig(max_wait_factor=2.0))) as url:
        for _ in range(8):  # the pace is known from then on
            assert httpx.post(f"{url}{CHAT}", json=body).status_code == 200
        answers.clear()
        worker = in_background(lambda: httpx.post(f"{url}{CHAT}", json=body))
        eventually(lambda: len(engine.requests) == 9)
        assert httpx.post(f"{url}{CHAT}", json=body).status_code == 429
        response = httpx.post(f"{url}{CHAT}", json=body)
        assert int(response.headers["retry-after"]) >= 1
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
        told = r"retry after \d+ s, or send a larger ttft_slo"
        assert re.search(told, error["message"])
        codes: list[int] = []
        patient = {**body, "ttft_slo": 9.0}
        posting = in_background(
            lambda: codes.append(httpx.post(f"{url}{CHAT}", json=patient).status_code)
        )
        eventually(lambda: len(engine.requests) == 10)
        answers.set()
        posting.join()
        assert codes == [200]
        worker.join()
        counted = httpx.get(f"{url}/metrics").text
        assert 'tandem_shed_requests_total{reason="wait"} 2.0' in counted


def test_slow_readers_do_not_hold_up_others() -> None:
    words = tuple([20] * 200)
    engine = FakeEngine(play=lambda r, i: Script(tokens=words))
    with live(make_app(engine)) as url, httpx.Client(base_url=url) as slow_http:
        body = {**BODY, "stream": True, "logprobs": True, "top_logprobs": 20}
        with slow_http.stream("POST", CHAT, json=body) as unread:
            for _ in range(10):
                assert httpx.post(f"{url}{CHAT}", json=BODY).status_code == 200
            assert len(list(unread.iter_lines())) > 200


def test_keys_are_needed_on_every_route_but_health() -> None:
    server = ServerConfig(api_keys=("sk-test", "sk-other"))
    engine = FakeEngine()
    with live(make_app(engine, server)) as url, httpx.Client(base_url=url) as http:
        for method, route in (
            ("POST", CHAT),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/adapters"),
            ("GET", "/metrics"),
            ("POST", "/tokenize"),
            ("GET", "/unknown"),
        ):
            response = http.request(method, route)
            assert response.status_code == 401, route
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for route in ("/health", "/ready", "/health/", "/ready/"):
            assert http.get(route).status_code == http.head(route).status_code == 200
        for headers in ({"Authorization": "Bearer sk-test"}, {"X-Api-Key": "sk-other"}):
            assert http.post(CHAT, json=BODY, headers=headers).status_code == 200
        tenants = {request.tenant for request in engine.requests}
        assert len(tenants) == 2 and "" not in tenants
        assert not any("sk-" in tenant for tenant in tenants)
        wrong = {"Authorization": "Bearer sk-wrong"}
        assert http.get("/v1/models", headers=wrong).status_code == 401


def test_a_bug_is_a_500_in_shape_and_without_details(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(refuse=RuntimeError("secret detail"))
    with live(make_app(engine)) as url:
        response = httpx.post(f"{url}{CHAT}", json=BODY)
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.json()["error"]["type"] == "server_error"


def test_bodies_do_not_reach_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="tandem")
    with live(make_app(FakeEngine())) as url:
        turns = [{"role": "user", "content": "my secret words"}]
        httpx.post(f"{url}{CHAT}", json={**BODY, "messages": turns})
        httpx.post(f"{url}{CHAT}?secret=1", json={**BODY, "n": "secret"})
    records = [record for record in caplog.records if record.name.startswith("tandem")]
    assert [record.__dict__["fields"]["status"] for record in records] == [200, 400]
    assert not any("secret" in str(vars(record)) for record in records)
