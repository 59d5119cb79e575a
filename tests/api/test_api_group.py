"""A server over two engines: what its routes say of each, and of the death of one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from fake_engine import FakeEngine, Script
from patience import eventually
from serving import live, make_app
from tandem.api import state as api_state
from tandem.config import ServerConfig
from tandem.core.events import EngineStats
from tandem.core.ports import EngineState
from tandem.core.request import Request
from tandem.engine.group import EngineGroup

BODY = {"model": "demo", "max_tokens": 100}
TOKENS = tuple([20] * 50)


class Longest:
    """Long prompts belong to the second engine."""

    def place(self, request: Request, able: Sequence[int]) -> int:
        return able[-1] if len(request.prompt) > 20 else 0


def engines() -> tuple[FakeEngine, FakeEngine, EngineGroup]:
    main = FakeEngine(lambda request, index: Script(TOKENS, delay_s=0.005))
    other = FakeEngine(lambda request, index: Script(TOKENS, delay_s=0.005, dies_after=10))
    return main, other, EngineGroup(main, {"overflow": other}, Longest(), max_sequences=8)


def completion(http: httpx.Client, prompt: str, *, stream: bool = False) -> httpx.Response:
    return http.post("/v1/completions", json={**BODY, "prompt": prompt, "stream": stream})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_an_engine_that_dies_gets_an_error_and_the_others_go_on(stream: bool) -> None:
    main, other, group = engines()
    with live(make_app(group)) as url, httpx.Client(base_url=url) as http:
        lost = completion(http, "word " * 30, stream=stream)
        assert lost.status_code == (200 if stream else 503)
        assert "engine_unavailable" in lost.text
        assert other.state is EngineState.DEAD
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        assert completion(http, "word").status_code == 200
        assert completion(http, "word " * 30).status_code == 200, "the main engine takes it"
        assert (len(main.requests), len(other.requests)) == (2, 1)


def test_a_queue_of_long_answers_refuses_no_request_of_an_idle_main_engine() -> None:
    main = FakeEngine(lambda request, index: Script(TOKENS))
    answers = threading.Event()
    other = FakeEngine(lambda request, index: Script(TOKENS[:2], gate=answers))
    group = EngineGroup(main, {"overflow": other}, Longest(), max_sequences=8)
    server = ServerConfig(max_waiting_requests=4)
    with (
        live(make_app(group, server)) as url,
        httpx.Client(base_url=url) as http,
        ThreadPoolExecutor(1) as client,
    ):
        first = client.submit(completion, http, "word " * 30)
        eventually(lambda: other.requests)
        assert {completion(http, "word " * 30).status_code for _ in range(8)} == {200}
        assert completion(http, "word").status_code == 200
        answers.set()
        assert first.result().status_code == 200
        assert len(other.requests) == 1 and len(main.requests) == 9


def test_the_server_is_ready_as_long_as_its_main_engine_is() -> None:
    main, other, group = engines()
    with live(make_app(group)) as url, httpx.Client(base_url=url) as http:
        main.state = EngineState.DEAD
        assert http.get("/health").status_code == http.get("/ready").status_code == 503
        main.state, other.state = EngineState.READY, EngineState.STARTING
        assert http.get("/health").status_code == http.get("/ready").status_code == 200


def test_metrics_name_the_engine_where_each_has_its_own() -> None:
    _, other, group = engines()
    with live(make_app(group)) as url, httpx.Client(base_url=url) as http:
        text = http.get("/metrics").text
        for engine in ("main", "overflow"):
            assert f'tandem_engine_up{{engine="{engine}"}} 1.0' in text
            assert f'tandem_kv_blocks_held{{engine="{engine}",work_class="online"}} 12.0' in text
            assert f'tandem_iteration_tokens_bucket{{engine="{engine}",le="64.0"}} 5.0' in text
        assert text.count("# TYPE tandem_kv_blocks_held ") == 1
        assert "tandem_time_to_first_token_seconds_count 0.0" in text, "nobody knows whose it was"
        other.state = EngineState.DEAD
        text = http.get("/metrics").text
        assert 'tandem_engine_up{engine="overflow"} 0.0' in text
        assert 'tandem_num_requests_running{engine="main"} 0.0' in text
        assert 'tandem_num_requests_running{engine="overflow"}' not in text


class Silent(FakeEngine):
    """It lives, but its process says nothing."""

    asked = 0

    async def stats(self, last: int = 0, after: int = 0) -> EngineStats:
        self.asked += 1
        await asyncio.sleep(3600)
        return await super().stats(last, after)


@pytest.mark.parametrize("state", [EngineState.READY, EngineState.QUIET])
def test_metrics_do_not_wait_for_an_engine_that_hangs(
    state: EngineState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_state, "_OTHERS_TIMEOUT_S", 0.1)
    main, other = FakeEngine(), Silent()
    group = EngineGroup(main, {"overflow": other}, Longest(), max_sequences=8)
    with live(make_app(group)) as url, httpx.Client(base_url=url) as http:
        other.state = state
        text = http.get("/metrics").text
        assert 'tandem_engine_up{engine="main"} 1.0' in text
        assert 'tandem_engine_up{engine="overflow"} 0.0' in text
        assert other.asked == (state is EngineState.READY), "it is known that nobody answers"


def test_one_engine_has_no_label() -> None:
    with live(make_app(FakeEngine())) as url:
        assert "engine=" not in httpx.get(f"{url}/metrics").text
