"""A live server for tests: uvicorn in a thread on a free port, over any engine client."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

import tandem
from tandem.api.app import create_app
from tandem.api.surface import Surface
from tandem.config import AdapterConfig, ServerConfig
from tandem.core.clock import MonotonicClock
from tandem.core.ports import EngineClient
from tandem.services.adapters import Adapters
from tandem.services.admission import Admission
from tandem.services.answer import Tools
from tandem.services.auth import ApiKeys
from tandem.services.generation import Generation
from tandem.services.models import Models
from tandem.services.tokenizer import Tokenizer
from tandem.telemetry.metrics import ServerMetrics

DEMO_MODEL = Path(tandem.__file__).parent / "demo_model"


@cache
def demo_tokenizer() -> Tokenizer:
    """The bundled model's tokenizer."""
    return Tokenizer.load(DEMO_MODEL)


def make_app(
    client: EngineClient,
    server: ServerConfig | None = None,
    adapters: AdapterConfig | None = None,
    tokenizer: Tokenizer | None = None,
) -> FastAPI:
    """The application over `client`, served as `demo`."""
    server = server or ServerConfig()
    adapters = adapters or AdapterConfig()
    clock = MonotonicClock()
    metrics = ServerMetrics(CollectorRegistry())
    models = Models(client, "demo", created_s=1_700_000_000)
    tools = Tools(
        client=client,
        tokenizer=tokenizer or demo_tokenizer(),
        admission=Admission(server.max_waiting_requests, server.max_waiting_tokens, clock),
        metrics=metrics,
        clock=clock,
    )
    surface = Surface(
        client=client,
        generation=Generation(tools, models, max_choices=server.max_n, rng=random.Random(1)),
        models=models,
        adapters=Adapters(client, adapters.roots, adapters.preload),
        keys=ApiKeys.read(server.api_keys, server.api_key_file),
        metrics=metrics,
        max_body_bytes=server.max_body_bytes,
    )
    return create_app(surface)


@contextmanager
def live(app: FastAPI) -> Iterator[str]:
    """Serve `app` in a thread; yields its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Poll until `condition()` is true; an assertion error if it never is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.01)
