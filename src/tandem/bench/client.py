"""Sends a planned workload to an OpenAI-compatible server and notes when each token came.

Open loop: a request is sent at its time, whatever happened to the others. Knows HTTP and OpenAI's
two generation endpoints, not the figures. Invariant: every planned request has exactly one outcome,
and no outcome is an exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from tandem.bench.events import StreamReader, message_of
from tandem.bench.http1 import Exchange, Origin, ProtocolError, connect, fetch
from tandem.bench.measure import Outcome
from tandem.bench.workload import PlannedRequest, as_text
from tandem.core.errors import TandemError


class Endpoint(StrEnum):
    """OpenAI's endpoint that gets the load."""

    COMPLETIONS = "completions"
    CHAT = "chat"


PATHS = {Endpoint.COMPLETIONS: "/v1/completions", Endpoint.CHAT: "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how to talk to it."""

    origin: Origin
    model: str
    endpoint: Endpoint = Endpoint.COMPLETIONS
    api_key: str | None = None
    # send words where the completions endpoint would take token ids (chat always gets words)
    text: bool = False
    ignore_eos: bool = True  # a field that not every server knows
    usage: bool = True  # likewise
    temperature: float = 0.0
    timeout_s: float = 600.0

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", "Accept": "text/event-stream", **key}

    def body(self, request: PlannedRequest) -> bytes:
        """The JSON of one request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.endpoint is Endpoint.CHAT:
            fields["messages"] = [{"role": "user", "content": as_text(request.prompt)}]
        else:
            fields["prompt"] = as_text(request.prompt) if self.text else request.prompt
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.usage:
            fields["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(fields)


class _ModelCard(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


async def first_model(origin: Origin, api_key: str | None) -> str:
    """The id of the first model that the server lists. Raises `TandemError` if it lists none."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        status, body = await fetch(origin, "GET", "/v1/models", headers)
    except (OSError, ProtocolError) as error:
        raise TandemError(f"no server answers at {origin.host}:{origin.port}: {error}") from error
    if status != 200:
        raise TandemError(f"the server refused to list its models (HTTP {status}); say --model")
    models = msgspec.json.decode(body, type=_ModelList).data
    if not models:
        raise TandemError("the server lists no model; say --model")
    return models[0].id


async def run_load(
    requests: list[PlannedRequest], target: Target, on_done: Callable[[Outcome], None]
) -> list[Outcome]:
    """Send every request at its time; returns outcomes in the order of `requests`.

    `on_done` is called as each request ends. Times in outcomes count from the call.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def one(request: PlannedRequest) -> Outcome:
        outcome = await _send(request, target, began_s)
        on_done(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            delay_s = began_s + request.at_s - loop.time()
            if delay_s > 0.0:
                await asyncio.sleep(delay_s)
            tasks.append(group.create_task(one(request)))
    return [task.result() for task in tasks]


async def _send(request: PlannedRequest, target: Target, began_s: float) -> Outcome:
    clock = asyncio.get_running_loop().time
    outcome = Outcome(request.index, request.at_s, clock() - began_s)
    outcome.prompt_tokens = len(request.prompt)
    path = PATHS[target.endpoint]
    body = target.origin.request("POST", path, target.headers, target.body(request))
    stream = _Stream(body, lambda: clock() - began_s)
    try:
        async with asyncio.timeout(target.timeout_s):
            await connect(target.origin, stream.exchange)
            await stream.exchange.done
    except TimeoutError:
        outcome.error = "timeout"
    except ConnectionError as error:
        outcome.error, outcome.message = "connection", str(error)
    except OSError as error:
        outcome.error, outcome.message = "connect", str(error)
    except (ProtocolError, msgspec.MsgspecError, ValueError) as error:
        outcome.error, outcome.message = "protocol", str(error)
    else:
        outcome.error, outcome.message = stream.verdict()
    finally:
        stream.exchange.close()
    outcome.ended_s = clock() - began_s
    _count_tokens(outcome, stream.reader)
    return outcome


def _count_tokens(outcome: Outcome, reader: StreamReader) -> None:
    """Use the server's counts if it has them: an event may have several tokens, or part of one."""
    outcome.output_s = reader.output_s
    outcome.output_tokens = len(reader.output_s)
    if reader.usage is not None:
        outcome.prompt_tokens = reader.usage.prompt_tokens
        outcome.output_tokens = reader.usage.completion_tokens
        outcome.usage_reported = True


class _Stream:
    """An answer being received: events if the status is 200, else the error's body."""

    def __init__(self, request: bytes, clock: Callable[[], float]) -> None:
        self.reader = StreamReader()
        self.exchange = Exchange(request, self._receive)
        self._clock = clock
        self._refusal = bytearray()

    def verdict(self) -> tuple[str | None, str]:
        """Kind and message of the error, or `(None, "")` for a complete answer."""
        if self.exchange.status != 200:
            return f"http {self.exchange.status}", _refusal_text(bytes(self._refusal))
        if self.reader.error is not None:
            return "stream", self.reader.error
        if not self.reader.ended and not self.reader.finished:
            return "truncated", "the stream ended without a finish_reason or [DONE]"
        return None, ""

    def _receive(self, data: bytes) -> None:
        if self.exchange.status == 200:
            self.reader.feed(data, self._clock())
        else:
            self._refusal += data


def _refusal_text(body: bytes) -> str:
    """Text of an error answer: OpenAI's message, or its first characters."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body[:200].decode(errors="replace")
    if isinstance(decoded, dict):
        return message_of(decoded.get("error", decoded))
    return str(decoded)[:200]
