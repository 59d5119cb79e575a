"""An OpenAI-like server over asyncio streams that answers from a script with known delays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """How a generation request is answered; nothing of it is before `after` is set."""

    first_s: float = 0.0
    gap_s: float = 0.0
    status: int = 200
    usage: bool = True
    cut_after: int | None = None
    error_after: int | None = None
    stall: bool = False
    chunk_bytes: int | None = None
    newline: str = "\n"
    after: asyncio.Event | None = None


@dataclass
class ScriptedServer:
    """`choose` picks the script of a request by its body; `seen` has `(body, arrival)`."""

    choose: Callable[[dict[str, Any]], Script]
    seen: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    metrics: str = ""
    port: int = 0
    gone: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            path = head.split(" ")[1]
            length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
            body = json.loads(await reader.readexactly(length) or b"{}")
            if path == "/v1/models":
                send_whole(writer, 200, b'{"data": [{"id": "scripted"}]}')
            elif path == "/metrics":
                send_whole(writer, 200, self.metrics.encode())
            else:
                self.seen.append((body, asyncio.get_running_loop().time()))
                await answer(writer, path, body, self.choose(body))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone += 1
        finally:
            writer.close()


def send_whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} Scripted\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def answer(
    writer: asyncio.StreamWriter, path: str, body: dict[str, Any], script: Script
) -> None:
    if script.after is not None:
        await script.after.wait()
    if script.status != 200:
        error = {"error": {"message": "scripted refusal", "type": "x"}}
        send_whole(writer, script.status, json.dumps(error).encode())
        return
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chat = "chat" in path
    if chat:
        await event(writer, script, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    for index in range(body["max_tokens"]):
        await asyncio.sleep(script.gap_s if index else script.first_s)
        if script.stall:
            await asyncio.sleep(3600)
        if index == script.error_after:
            await event(writer, script, {"error": {"message": "engine ended", "code": 500}})
            break
        if index == script.cut_after:
            writer.transport.abort()
            return
        # Every third token ends inside a character: it has no text yet.
        text = "" if index % 3 == 2 else f"w{index} "
        choice = {"delta": {"content": text}} if chat else {"text": text}
        await event(writer, script, {"choices": [choice]})
    ending = {"delta": {}} if chat else {"text": ""}
    await event(writer, script, {"choices": [ending | {"finish_reason": "length"}]})
    if script.usage and body.get("stream_options"):
        usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
        await event(writer, script, {"choices": [], "usage": usage})
    await event(writer, script, "[DONE]")
    writer.write(b"0\r\n\r\n")


async def event(writer: asyncio.StreamWriter, script: Script, payload: Any) -> None:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    data = f"data: {text}{script.newline}{script.newline}".encode()
    size = script.chunk_bytes or len(data)
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if script.chunk_bytes:
            await asyncio.sleep(0)
    await writer.drain()


@asynccontextmanager
async def scripted(
    choose: Script | Callable[[dict[str, Any]], Script],
) -> AsyncIterator[ScriptedServer]:
    pick = (lambda _: choose) if isinstance(choose, Script) else choose
    server = ScriptedServer(pick)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(server.handle(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
