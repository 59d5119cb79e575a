"""A live server over a scripted engine, for the tests of the terminal client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chatting import TOKENS
from fake_engine import FakeEngine, Script
from serving import live, make_app
from tandem.config import ServerConfig


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(play=lambda r, i: Script(tokens=TOKENS))


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with live(make_app(engine, ServerConfig(api_keys=("sk-test",)))) as url:
        yield f"{url}/v1"
