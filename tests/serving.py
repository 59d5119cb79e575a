"""A live server for tests: uvicorn in a thread on a free port, over any engine client."""

from __future__ import annotations

import asyncio
import atexit
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import uvicorn
from fastapi import FastAPI
from transformers import AutoTokenizer

import tandem
from patience import PATIENCE_S
from tandem.api.protocol import PatientProtocol
from tandem.build_app import build_app
from tandem.config import AdapterConfig, ServerConfig, Settings, StoreConfig
from tandem.core.ports import EngineClient
from tandem.services.answering.tokenizer import Tokenizer

DEMO_MODEL = Path(tandem.__file__).parent / "demo_model"


@cache
def demo_tokenizer() -> Tokenizer:
    """The bundled model's tokenizer."""
    return Tokenizer.load(DEMO_MODEL)


def thinking_tokenizer(**shipped: Any) -> Tokenizer:
    """The bundled model's, with prompts that begin reasoning, which finished turns do not show.
    `shipped` is how a response template of its own says where reasoning ends."""
    backend = AutoTokenizer.from_pretrained(DEMO_MODEL)
    backend.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    if shipped:
        fields = {"thinking": {"open": "<think>", **shipped}, "content": {}}
        backend.response_template = {"start_anchor": "<|im_start|>assistant", "fields": fields}
    return Tokenizer(backend)


def make_app(
    client: EngineClient,
    server: ServerConfig | None = None,
    adapters: AdapterConfig | None = None,
    tokenizer: Tokenizer | None = None,
    **sections: Any,
) -> FastAPI:
    """The application over `client`, served as `demo`; its state ends with the tests.

    `sections` are other parts of the configuration, such as `store` and `learning`.
    """
    settings = Settings(
        server=server or ServerConfig(),
        adapters=adapters or AdapterConfig(),
        store=sections.pop("store", None) or StoreConfig(directory=new_directory()),
        **sections,
    )
    return build_app(settings, client, tokenizer or demo_tokenizer())


def new_directory() -> str:
    """An empty directory that is removed when the process ends."""
    directory = mkdtemp(prefix="tandem-test-")
    atexit.register(rmtree, directory, ignore_errors=True)
    return directory


@contextmanager
def sent(url: str, route: str, body: dict[str, Any], key: str = "none") -> Iterator[None]:
    """A request is on its way; its client leaves at the end."""
    content = json.dumps(body).encode()
    head = (
        f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
        connection.sendall(head.encode() + content)
        yield


class _Server(uvicorn.Server):
    """Ends at once: uvicorn itself looks every 0.1 s whether it is to, and waits as long again."""

    async def main_loop(self) -> None:
        tick = 0
        while not await self.on_tick(tick // 10):
            tick = (tick + 1) % 864_000
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._wait_tasks_to_complete()
        await self.lifespan.shutdown()


@contextmanager
def live(app: FastAPI, http: type[PatientProtocol] = PatientProtocol) -> Iterator[str]:
    """Serve `app` in a thread; yields its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=http, log_level="error", access_log=False, lifespan="on")
        server = _Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + PATIENCE_S
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=PATIENCE_S)
            assert not thread.is_alive()
