"""Large, slow and unfinished bodies, heads and readers: each has a bound, and others are served."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from uvicorn.server import ServerState

from fake_engine import FakeEngine, Script
from patience import PATIENCE_S
from serving import live, make_app
from tandem.api.bodies import Bodies
from tandem.api.errors import TooSlow
from tandem.api.protocol import PatientProtocol
from tandem.core.errors import InvalidRequest, Overloaded

CHAT = "/v1/chat/completions"
MEBIBYTE = 1 << 20
SMALL = 64 * 1024


class Hasty(PatientProtocol):
    patience_s = 0.5


class Parts:
    """A client that sends parts of a body, each after a delay."""

    def __init__(self, *parts: int, delay_s: float = 0.0, whole: bool = True) -> None:
        self.parts = list(parts)
        self.delay_s = delay_s
        self.whole = whole

    async def receive(self) -> dict[str, Any]:
        if not self.parts:
            await asyncio.sleep(3600)
        await asyncio.sleep(self.delay_s)
        size = self.parts.pop(0)
        more = bool(self.parts) or not self.whole
        return {"type": "http.request", "body": bytes(size), "more_body": more}


async def take(bodies: Bodies, client: Parts, path: str = CHAT) -> int:
    """Bytes of a body that was read to its end."""
    with bodies.taking({"type": "http", "path": path}, client.receive) as receive:
        size = 0
        while True:
            message = await receive()
            size += len(message["body"])
            if not message["more_body"]:
                return size


async def test_all_large_bodies_share_a_budget_and_small_ones_come_in() -> None:
    bodies = Bodies(MEBIBYTE)
    held = [
        asyncio.create_task(take(bodies, Parts(MEBIBYTE // 2, MEBIBYTE // 2, whole=False)))
        for _ in range(16)
    ]
    while bodies.held_bytes < 16 * MEBIBYTE:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="large request bodies"):
        await take(bodies, Parts(SMALL, 1))
    assert await take(bodies, Parts(SMALL)) == SMALL
    assert await take(bodies, Parts(*[1] * 100)) == 100
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert bodies.held_bytes == 0
    # What is read and forgotten beyond the largest size is not held, nor what an upload spools.
    assert await take(bodies, Parts(*[MEBIBYTE] * 40)) == 40 * MEBIBYTE
    assert await take(bodies, Parts(*[MEBIBYTE] * 40), "/v1/files") == 40 * MEBIBYTE


async def test_a_body_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = Bodies(MEBIBYTE, patience_s=0.2)
    for slow in (
        Parts(10, whole=False),  # stops
        Parts(*[1] * 50, delay_s=0.05),  # trickles
        Parts(whole=False),  # never begins
    ):
        with pytest.raises(TooSlow):
            await take(bodies, slow)

    loop, late_s = asyncio.get_running_loop(), 0.0

    class Steady(Parts):
        async def receive(self) -> dict[str, Any]:
            nonlocal late_s
            late_s += 30.0
            return await super().receive()

    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + late_s)
    bodies = Bodies(MEBIBYTE, patience_s=60.0)
    assert await take(bodies, Steady(*[MEBIBYTE] * 10)) == 10 * MEBIBYTE
    assert bodies.held_bytes == 0


async def test_once_a_body_is_complete_the_client_may_wait() -> None:
    bodies, client = Bodies(MEBIBYTE, patience_s=0.05), Parts(5)
    with bodies.taking({"type": "http", "path": CHAT}, client.receive) as receive:
        await receive()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await receive()


@pytest.fixture
def hasty() -> Iterator[str]:
    engine = FakeEngine(play=lambda r, i: Script(tokens=(20,) * 200))
    with live(make_app(engine), http=Hasty) as url:
        yield url


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((str(parts.hostname), parts.port or 0), timeout=PATIENCE_S)


def closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nHost: loc", b"\r\n", HEAD + b"Content-Length: 9\r\n"],
    ids=range(4),
)
def test_a_head_that_never_ends_is_not_waited_for(hasty: str, sent: bytes) -> None:
    with connect(hasty) as connection:
        connection.sendall(sent)
        assert closed(connection)


def test_a_trickled_head_is_not_waited_for(hasty: str) -> None:
    with connect(hasty) as connection:
        begun_s = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begun_s < PATIENCE_S:
                connection.sendall(b"X")
                time.sleep(0.1)


def test_a_refused_body_that_never_ends_is_not_waited_for(hasty: str) -> None:
    with connect(hasty) as connection:
        connection.sendall(HEAD + b"Content-Type: text/plain\r\nContent-Length: 99\r\n\r\nx")
        assert b" 415 " in connection.recv(65536)
        connection.sendall(b"y")  # else uvicorn itself closes what is idle
        assert closed(connection)


def test_an_idle_connection_is_kept_and_a_slow_answer_waited_for(hasty: str) -> None:
    with httpx.Client(base_url=hasty) as http:
        assert http.get("/health").status_code == 200
        time.sleep(1.0)
        assert http.get("/health").status_code == 200
    engine = FakeEngine(play=lambda r, i: Script(tokens=(), delay_s=1.0))
    with live(make_app(engine), http=Hasty) as url:
        body = {"model": "demo", "prompt": "x"}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def test_a_reader_that_never_reads_on_is_not_waited_for() -> None:
    app, ended = FastAPI(), threading.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                await asyncio.sleep(0)
                yield bytes(MEBIBYTE)
        finally:
            ended.set()

    @app.get("/")
    async def answer() -> StreamingResponse:
        return StreamingResponse(endless())

    with live(app, http=Hasty) as url, connect(url) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ended.wait(timeout=60)


async def test_a_reader_that_reads_on_slowly_is_waited_for() -> None:
    """Though the buffer never gets so empty that asyncio tells of it."""
    unsent_bytes, aborted = iter((9, 8, 8, 5, 5, 5)), asyncio.Event()

    class Hastiest(PatientProtocol):
        patience_s = 0.0

    class Buffer(asyncio.Transport):
        def get_write_buffer_size(self) -> int:
            return next(unsent_bytes)

        def is_closing(self) -> bool:
            return True  # then no head is expected

        def abort(self) -> None:
            aborted.set()

    config = uvicorn.Config(make_app(FakeEngine()), http=Hastiest, log_level="error")
    config.load()
    protocol, (near, far) = Hastiest(config, ServerState(), {}), socket.socketpair()
    with near, far:
        protocol.connection_made(Buffer({"socket": near}))
        protocol.pause_writing()
        await asyncio.wait_for(aborted.wait(), PATIENCE_S)
    assert list(unsent_bytes) == []


def test_a_body_does_not_wait_until_its_head_is_acknowledged() -> None:
    """Which takes a client 40 ms, at each request but its first ones."""
    delays = list[bool]()

    class Noted(PatientProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            made = transport.get_extra_info("socket")
            delays.append(not made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    with live(make_app(FakeEngine()), http=Noted) as url:
        httpx.get(f"{url}/health")
    assert delays == [False]


def test_a_unix_socket_is_served_with_the_same_patience(tmp_path: Path) -> None:
    owed = list[bool]()

    class Noted(PatientProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            owed.append(self._owed is not None)

    async def ask(path: str) -> int:
        config = uvicorn.Config(make_app(FakeEngine()), http=Noted, uds=path, log_level="error")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path)) as http:
            answer = await http.get("http://localhost/health")
        server.should_exit = True
        await serving
        return answer.status_code

    assert asyncio.run(ask(str(tmp_path / "socket"))) == 200 and owed == [True]


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """Of a new server: one that has checked a large body rests 31 times as long as that took."""
    headers = {"content-type": "application/json"}
    with (
        live(make_app(FakeEngine())) as url,
        httpx.Client(base_url=url, headers=headers, timeout=60) as http,
    ):
        yield http


def chat_of(turns: str) -> bytes:
    return f'{{"model": "demo", "messages": [{turns}]}}'.encode()


AB = "ab " * 2_400_000
LARGE = {
    "empty messages": (CHAT, chat_of(", ".join(['{"role": "user", "content": ""}'] * 230_000))),
    "wrong messages": (CHAT, chat_of(", ".join(["1"] * 2_000_000))),
    "a long message": (CHAT, chat_of(f'{{"role": "user", "content": "{"word " * 1_400_000}"}}')),
    "spaces": (CHAT, chat_of(f'{{"role": "user", "content": "{" " * 7_000_000}"}}')),
    "token ids": (
        "/v1/completions",
        b'{"model": "demo", "prompt": [' + b", ".join([b"5"] * 2_000_000) + b"]}",
    ),
    "a long prompt": (
        "/v1/completions",
        b'{"model": "demo", "prompt": "' + b"ab " * 2_400_000 + b'"}',
    ),
    "tokens of a prompt": ("/tokenize", b'{"prompt": "' + b"ab " * 2_400_000 + b'"}'),
    "tokens of a chat": ("/tokenize", chat_of(f'{{"role": "user", "content": "{AB}"}}')),
    "wrong ids": ("/detokenize", b'{"tokens": [' + b", ".join([b'"x"'] * 1_500_000) + b"]}"),
    "metadata": (
        "/v1/feedback",
        b'{"metadata": {' + b", ".join(b'"%d": 1' % n for n in range(600_000)) + b"}}",
    ),
    "fields": (CHAT, b"{" + b", ".join(b'"%d": 1' % n for n in range(600_000)) + b"}"),
    "nesting": (CHAT, b'{"metadata": ' + b"[" * 4_000_000),
}


@pytest.mark.parametrize("what", LARGE)
def test_large_bodies_are_refused_early(http: httpx.Client, what: str) -> None:
    route, body = LARGE[what]
    assert len(body) < 8 * MEBIBYTE
    begun_s = time.process_time()
    answer = http.post(route, content=body)
    used_s = time.process_time() - begun_s
    assert answer.status_code == 400, answer.text[:500]
    error = answer.json()["error"]
    if what in ("a long message", "spaces", "token ids", "a long prompt"):
        assert "This model's maximum context length is 256 tokens. " in error["message"]
    assert used_s < 4.0, used_s  # some took 14 s


async def test_what_is_done_with_large_bodies_is_done_beside_the_event_loop() -> None:
    here, bodies = threading.get_ident(), Bodies(MEBIBYTE)
    assert await bodies.check(bytes(100), threading.get_ident) == here
    assert await bodies.check(bytes(100_000), threading.get_ident) != here
    assert await bodies.check(bytes(MEBIBYTE), threading.get_ident) != here


async def test_large_bodies_are_checked_in_turn_and_leave_time_to_others() -> None:
    bodies, begun_s, ended_s = Bodies(MEBIBYTE), list[float](), list[float]()

    def work() -> None:
        begun_s.append(time.monotonic())
        until_s = time.thread_time() + 0.01
        while time.thread_time() < until_s:
            pass
        ended_s.append(time.monotonic())
        raise InvalidRequest("not this one")

    waiting = [bodies.check(bytes(MEBIBYTE), work) for _ in range(3)]
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(each, InvalidRequest) for each in found)
    rests = [later - ended for ended, later in zip(ended_s, begun_s[1:], strict=False)]
    assert min(rests) >= 0.3  # 31 times what a check took
    bodies._next_s = asyncio.get_running_loop().time() + 3600.0
    large = asyncio.create_task(bodies.check(bytes(MEBIBYTE), list))
    assert await bodies.check(bytes(100_000), list) == []
    assert not large.done()
    large.cancel()


def test_a_prompt_that_just_fits_is_not_refused_for_its_length(http: httpx.Client) -> None:
    spaces = " " * 20_000  # a few tokens of many characters
    answer = http.post("/tokenize", json={"prompt": spaces}).json()
    fits = answer["count"] < 256
    sent = http.post("/v1/completions", json={"model": "demo", "prompt": spaces, "max_tokens": 1})
    assert (sent.status_code == 200) is fits


def test_context_overflow_is_told_in_openais_words(http: httpx.Client) -> None:
    turns = [{"role": "user", "content": "word " * 2000}]
    error = http.post(CHAT, json={"model": "demo", "messages": turns}).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert error["message"].startswith("This model's maximum context length is 256 tokens. However")
    turns = [{"role": "user", "content": "Hi"}]
    body = {"model": "demo", "messages": turns, "max_tokens": 256}
    error = http.post(CHAT, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert "256 in the completion" in error["message"]
    body = {"model": "demo", "prompt": [9] * 300}
    error = http.post("/v1/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
