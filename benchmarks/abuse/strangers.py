"""Strangers: each sends one kind of harmful input until its time is over.

`python -m benchmarks.abuse.strangers` is a process of them: they stand for other machines, so what
they need themselves gives way to what the server needs. Knows the API's routes and raw sockets.
Invariant: every stranger waits at least a little between two attempts, keeps the number of its
connections, and counts what it was answered by status.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

import httpx
import typer

LARGE_BYTES = 7_500_000
BOMB_MIB = 1024  # unpacked
SLOW = 16
IDLE = 300
PAUSE_S = 0.2
SLOW_PAUSE_S = 2.0
NICE = 10
_CHAT = "/v1/chat/completions"
_CLOSED = "closed"


@dataclass(slots=True)
class Strangers:
    """All of them against one server; `model` is what it serves."""

    url: str
    model: str
    answered: dict[str, Counter[str]] = field(default_factory=dict)

    async def run_for(self, seconds: float) -> dict[str, dict[str, int]]:
        """How often each was answered what."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.run(), seconds)
        return {name: dict(found) for name, found in self.answered.items()}

    async def run(self) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient(base_url=self.url, timeout=120.0) as http:
            bodies = large_bodies(self.model)
            async with asyncio.TaskGroup() as group:
                for name, (route, body) in bodies.items():
                    group.create_task(self._again(name, _sender(http, route, body)))
                group.create_task(self._again("hostile archive", _uploader(http, self.model)))
                for _ in range(SLOW):
                    group.create_task(self._again("slow body", self._slow_body))
                    group.create_task(self._again("slow head", self._slow_head))
                for _ in range(IDLE):
                    group.create_task(self._again("idle connection", self._idle))

    async def _again(self, name: str, once: Callable[[], Awaitable[str]]) -> None:
        found = self.answered.setdefault(name, Counter())
        while True:
            try:
                found[await once()] += 1
            except (httpx.HTTPError, OSError) as error:
                found[type(error).__name__] += 1
            await asyncio.sleep(PAUSE_S)

    async def _slow_body(self) -> str:
        """Announces a large body and sends it byte by byte."""
        head = f"POST {_CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return await self._drip(f"{head}Content-Length: {LARGE_BYTES}\r\n\r\n".encode(), b" ")

    async def _slow_head(self) -> str:
        """Begins a head and never ends it."""
        return await self._drip(f"GET {_CHAT} HTTP/1.1\r\nHost: localhost\r\nX-A: ".encode(), b"a")

    async def _idle(self) -> str:
        """Connects and says nothing."""
        return await self._drip(b"", b"")

    async def _drip(self, first: bytes, part: bytes) -> str:
        at = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        try:
            writer.write(first)
            while True:
                await writer.drain()
                try:
                    async with asyncio.timeout(SLOW_PAUSE_S):
                        line = await reader.readline()
                    return line.split()[1].decode() if line else _CLOSED
                except TimeoutError:
                    writer.write(part)
        finally:
            writer.close()


def large_bodies(model: str) -> dict[str, tuple[str, bytes]]:
    """By name: a route, and a body of some megabytes for it."""
    words = "word " * (LARGE_BYTES // 5)
    turn = {"role": "user", "content": words}
    few = {"role": "user", "content": ""}
    feedback = {"adapter": "stranger", "messages": [{"role": "user", "content": "Hello"}]}
    whole = {
        "long message": (_CHAT, {"model": model, "messages": [turn]}),
        "many messages": (_CHAT, {"model": model, "messages": [few] * (LARGE_BYTES // 40)}),
        "token ids": ("/v1/completions", {"model": model, "prompt": [5] * (LARGE_BYTES // 3)}),
        "text to count": ("/tokenize", {"prompt": words}),
        "chat to count": ("/tokenize", {"messages": [turn]}),
        "long feedback": ("/v1/feedback", {**feedback, "demonstration": words}),
    }
    found = {name: (route, json.dumps(body).encode()) for name, (route, body) in whole.items()}
    return found | {"nesting": (_CHAT, b'{"messages": ' + b"[" * LARGE_BYTES)}


def bomb() -> bytes:
    """A zip of a megabyte that would unpack to a thousand, with a slow pattern as its
    configuration."""
    config = json.dumps({"r": 8, "target_modules": "(a+)+$" * 1000})
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("adapter_config.json", config)
        with archive.open("adapter_model.safetensors", "w", force_zip64=True) as weights:
            for _ in range(BOMB_MIB):
                weights.write(bytes(1 << 20))
    return packed.getvalue()


def _sender(http: httpx.AsyncClient, route: str, body: bytes) -> Callable[[], Awaitable[str]]:
    headers = {"content-type": "application/json"}

    async def send() -> str:
        return str((await http.post(route, content=body, headers=headers)).status_code)

    return send


def _uploader(http: httpx.AsyncClient, model: str) -> Callable[[], Awaitable[str]]:
    content = bomb()

    async def upload() -> str:
        form = {"file": ("a.zip", content)}
        sent = await http.post("/v1/files", data={"purpose": "user_data"}, files=form)
        if sent.status_code != 200:
            return f"file {sent.status_code}"
        name = sent.json()["id"]
        imported = await http.post("/v1/adapters/bomb/import", json={"file_id": name})
        await http.delete(f"/v1/files/{name}")
        return str(imported.status_code)

    return upload


def main(
    url: Annotated[str, typer.Argument(help="Of the server.")],
    model: Annotated[str, typer.Argument(help="What it serves.")],
    seconds: Annotated[float, typer.Argument(help="How long.")],
) -> None:
    """Print, as JSON, what each stranger was answered."""
    os.nice(NICE)
    print(json.dumps(asyncio.run(Strangers(url, model).run_for(seconds))))


if __name__ == "__main__":
    typer.run(main)
