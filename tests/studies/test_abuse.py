"""The study of abuse tells what is worse than it may be, and its strangers are what they say."""

from __future__ import annotations

import asyncio
import io
import zipfile
from typing import Any

import pytest

from benchmarks.abuse import strangers
from benchmarks.abuse.__main__ import Phase, page, problems
from fake_engine import FakeEngine
from serving import live, make_app

GOOD: dict[str, Any] = {
    "minutes": 10.0,
    "alone": {"chat": {"requests": 100, "median": 20.0, "p95": 30.0}},
    "beside": {"chat": {"requests": 500, "median": 39.0, "p95": 59.0}},
    "failed": {"alone": {}, "beside": {}},
    "api_bytes": 500_000_000,
    "strangers": {"nesting": {"400": 7}},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"api_bytes": 1_200_000_000}, ["the API's process had 1.20 GB"]),
        ({"failed": {"alone": {}, "beside": {"chat 500": 2}}}, ["chat 500 failed 2 times"]),
        (
            {"beside": {"chat": {"requests": 500, "median": 41.0, "p95": 59.0}}},
            ["median of chat is 2.0 times as long"],
        ),
    ],
)
def test_what_is_too_bad_is_told(change: dict[str, Any], said: list[str]) -> None:
    assert problems(GOOD | change) == said
    assert "| chat | 20.0, 30.0 |" in page({"device": "cpu"}, "demo", GOOD)
    assert "| nesting | 400: 7 |" in page({"device": "cpu"}, "demo", GOOD)


def test_phases_add_up() -> None:
    one, two = Phase({"chat": [0.1]}, rss_bytes=5), Phase({"chat": [0.3], "health": [0.2]})
    one.add(two)
    assert one.summary("chat")["requests"] == 2 and one.summary("health")["median"] == 200.0
    assert one.rss_bytes == 5


def test_the_archive_is_small_and_would_be_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "BOMB_MIB", 8)
    packed = strangers.bomb()
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert sum(info.file_size for info in archive.infolist()) > 200 * len(packed)


async def test_every_stranger_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LARGE_BYTES", 30_000), ("BOMB_MIB", 8), ("SLOW", 1), ("IDLE", 1)):
        monkeypatch.setattr(strangers, name, value)
    with live(make_app(FakeEngine())) as url:
        group = strangers.Strangers(url, "demo")
        large = [*strangers.large_bodies("demo"), "hostile archive"]
        running = asyncio.create_task(group.run())
        async with asyncio.timeout(60):
            while not all(group.answered.get(name) for name in large):
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not any(status.startswith("5") for name in large for status in group.answered[name])
