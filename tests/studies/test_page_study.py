"""The study of the page asks for what the page asks for, and compares within a round."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random

import pytest

import tandem
from benchmarks.live.server import ServerSpec
from benchmarks.page.__main__ import (
    PLAIN,
    SITUATIONS,
    Figures,
    Load,
    measure,
    page,
    play,
    ratios,
)
from benchmarks.page.watching import ITERATIONS, VIEWS, asked, shown
from fake_engine import FakeEngine
from patience import until
from serving import live, make_app

WEB = Path(tandem.__file__).parent / "api" / "web"
LOAD = Load(clients=2, requests=3, prompt_tokens=5, output_tokens=8)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_views_ask_as_the_modules_of_the_page_do(view) -> None:
    text = (WEB / f"{view.name}.js").read_text()
    [every_ms] = re.findall(r"const POLL_MS = (\d+);", text)
    assert view.every_s == int(every_ms) / 1e3
    names = dict(re.findall(r"const (SHOWN|KEPT) = (\d+);", text))
    for name, value in names.items():
        text = text.replace(f"${{{name}}}", value)
    for route in view.routes:
        assert re.search(rf'[`"]{re.escape(route)}[`"$]', text), route


def spec_of(url: str, tmp_path: Path) -> ServerSpec:
    return ServerSpec("demo", int(url.rpartition(":")[2]), tmp_path, tmp_path / "log")


def test_a_round_has_every_situation(tmp_path: Path) -> None:
    situations = [each for each in SITUATIONS if each.watching is not shown]
    with live(make_app(FakeEngine())) as one, live(make_app(FakeEngine())) as other:
        specs = spec_of(one, tmp_path), spec_of(other, tmp_path)
        found = asyncio.run(play(specs, situations, LOAD, Random(1)))
    assert found.keys() == {each.name for each in situations}
    assert all(each.tokens_s > 0.0 for each in found.values())


def test_a_view_that_is_refused_fails_the_round() -> None:
    async def look(url: str) -> None:
        async with asked(url):
            await asyncio.sleep(0.5)

    async def look_in_vain(url: str) -> None:
        async with asked(url):
            watching = len(asyncio.all_tasks())
            await until(lambda: len(asyncio.all_tasks()) < watching)

    with live(make_app(FakeEngine())) as url:
        asyncio.run(look(url))
        with pytest.raises(RuntimeError, match="view of the page"):
            asyncio.run(look_in_vain(f"{url}/nothing"))
    assert any(ITERATIONS in view.routes for view in VIEWS)


def test_an_answer_that_fails_fails_the_round(tmp_path: Path) -> None:
    long = Load(1, 1, 5, output_tokens=10_000)
    with (
        live(make_app(FakeEngine())) as url,
        pytest.raises(RuntimeError, match="an answer failed"),
    ):
        asyncio.run(measure(spec_of(url, tmp_path), long, Random(1)))


def test_ratios_are_of_one_round() -> None:
    rounds = [
        {PLAIN.name: Figures(100.0 * speed, 10.0), "other": Figures(90.0 * speed, 11.0)}
        for speed in (1.0, 2.0, 4.0)
    ]
    throughput, pace = ratios(rounds, "other")
    assert (throughput.value, throughput.low, throughput.high) == pytest.approx((0.9,) * 3)
    assert pace.value == pytest.approx(1.1)
    text = page({"cpu": "x"}, "demo", LOAD, rounds)
    assert "| other | 210.0 | 0.900 (0.900 to 0.900) | 11.00 | 1.100 (1.100 to 1.100) |" in text
