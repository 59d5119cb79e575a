from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest
from scripted_server import Script, scripted

from tandem.bench.client import Endpoint, Target, first_model, run_load
from tandem.bench.http1 import Origin
from tandem.bench.measure import Outcome, summarise
from tandem.bench.workload import PlannedRequest
from tandem.core.errors import InvalidRequest, TandemError
from tandem.core.slo import Slo


def planned(times_s: list[float], output_tokens: int = 6) -> list[PlannedRequest]:
    return [
        PlannedRequest(index, at_s, (index, 2, 3), output_tokens)
        for index, at_s in enumerate(times_s)
    ]


async def load(
    script: Any, requests: list[PlannedRequest], **options: Any
) -> tuple[list[Outcome], Any]:
    async with scripted(script) as server:
        target = Target(Origin.parse(server.url), "scripted", **options)
        done: list[Outcome] = []
        outcomes = await run_load(requests, target, done.append)
        assert sorted(each.index for each in done) == [each.index for each in requests]
        return outcomes, server


async def test_latencies_are_those_of_the_script() -> None:
    outcomes, _ = await load(Script(first_s=0.1, gap_s=0.02), planned([0.0, 0.05]))
    for outcome in outcomes:
        assert outcome.error is None
        assert outcome.output_tokens == 6 and outcome.usage_reported
        assert outcome.prompt_tokens == 7
        assert len(outcome.output_s) == 6
        assert 0.1 <= outcome.ttft_s < outcome.e2e_s and outcome.e2e_s >= 0.2
        assert len(set(outcome.output_s)) == 6
        took_s = outcome.output_s[-1] - outcome.output_s[0]
        assert outcome.tpot_s == pytest.approx(took_s / 5)


async def test_a_slow_server_does_not_slow_arrivals() -> None:
    times_s = [0.02 * index for index in range(20)]
    all_came = asyncio.Event()
    came = count(1)

    def answered_when_all_came(body: dict[str, Any]) -> Script:
        if next(came) == len(times_s):
            all_came.set()
        return Script(after=all_came)

    async with asyncio.timeout(60.0):  # who waits for an answer before the last one leaves hangs
        outcomes, _ = await load(answered_when_all_came, planned(times_s, output_tokens=1))
    assert all(outcome.sent_s >= outcome.intended_s for outcome in outcomes)
    summary = summarise(outcomes)
    assert summary.intended_arrival_rate == pytest.approx(50.0)
    assert summary.completed == 20


async def test_a_client_that_falls_behind_is_counted_into_latency_and_reported() -> None:
    class Blocking(list[PlannedRequest]):
        def __iter__(self) -> Any:
            for request in super().__iter__():
                yield request
                import time

                time.sleep(0.1)

    async with scripted(Script()) as server:
        target = Target(Origin.parse(server.url), "scripted")
        outcomes = await run_load(Blocking(planned([0.0] * 4, 1)), target, lambda _: None)
    summary = summarise(outcomes)
    assert summary.client_fell_behind
    assert max(outcome.ttft_s or 0.0 for outcome in outcomes) > 0.09


@pytest.mark.parametrize("endpoint", list(Endpoint))
@pytest.mark.parametrize("script", [Script(chunk_bytes=5), Script(newline="\r\n", chunk_bytes=7)])
async def test_events_are_found_in_any_cut(endpoint: Endpoint, script: Script) -> None:
    script.usage = False
    outcomes, _ = await load(script, planned([0.0]), endpoint=endpoint)
    assert outcomes[0].error is None
    assert not outcomes[0].usage_reported
    assert outcomes[0].output_tokens == 6, "the opening role and the closing reason do not count"


async def test_errors_have_kinds() -> None:
    scripts = [
        Script(),
        Script(status=429),
        Script(status=500),
        Script(cut_after=2),
        Script(error_after=2),
    ]
    outcomes, _ = await load(lambda body: scripts[body["prompt"][0]], planned([0.0] * len(scripts)))
    outcomes += (await load(Script(stall=True), planned([0.0]), timeout_s=0.3))[0]
    kinds = [outcome.error for outcome in outcomes]
    assert kinds[:3] == [None, "http 429", "http 500"]
    assert kinds[3] in ("connection", "protocol")
    assert kinds[4:] == ["stream", "timeout"]
    assert outcomes[1].message == "scripted refusal"
    assert outcomes[4].message == "engine ended"
    summary = summarise(outcomes, Slo(10.0, 10.0))
    assert summary.completed == 1 and sum(summary.errors.values()) == 5
    assert summary.goodput_share == pytest.approx(1 / 6)
    assert summary.output_tokens == 6, "failed requests bring no throughput"


async def test_nobody_listens() -> None:
    async with scripted(Script()) as server:
        origin = Origin.parse(server.url)
    outcomes = await run_load(planned([0.0]), Target(origin, "x"), lambda _: None)
    assert outcomes[0].error in ("connect", "connection")
    with pytest.raises(TandemError, match="no server answers"):
        await first_model(origin, None)


async def test_what_is_sent() -> None:
    _, server = await load(Script(), planned([0.0]), api_key="secret")
    body, _ = server.seen[0]
    assert body["prompt"] == [0, 2, 3] and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert "Authorization: Bearer secret" in server.headers[0]
    _, server = await load(
        Script(), planned([0.0]), endpoint=Endpoint.CHAT, ignore_eos=False, usage=False
    )
    body, _ = server.seen[0]
    assert isinstance(body["messages"][0]["content"], str)
    assert "ignore_eos" not in body and "stream_options" not in body


async def test_first_model_is_asked_from_the_server() -> None:
    async with scripted(Script()) as server:
        assert await first_model(Origin.parse(server.url + "/v1"), None) == "scripted"


def test_addresses() -> None:
    assert Origin.parse("https://host/api/v1") == Origin("host", 443, True, "/api")
    assert Origin.parse("localhost:8000") == Origin("localhost", 8000, False, "")
    assert Origin.parse("[::1]:8000/v1") == Origin("::1", 8000, False, "")
    for wrong in ("ftp://host", "http://", "", "http://host:port", "http://[bad"):
        with pytest.raises(InvalidRequest, match="is not a server's address"):
            Origin.parse(wrong)


async def test_hundreds_of_streams_at_once() -> None:
    outcomes, _ = await load(Script(gap_s=0.001), planned([0.0] * 200, output_tokens=10))
    assert all(outcome.error is None for outcome in outcomes)
    await asyncio.sleep(0)
