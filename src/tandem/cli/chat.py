"""`tandem chat`: a terminal client for any OpenAI-compatible server.

Keeps the conversation and streams answers. Knows the wire format only, nothing of our server.
Invariant: what a model writes is shown as plain text; control characters never reach the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx
from rich.console import Console

from tandem.cli.remote import base_url

HELP = (
    "/reset forgets the conversation, /system TEXT sets the system prompt and forgets, "
    "/exit leaves; Ctrl-C stops an answer"
)
_CONNECT_TIMEOUT_S = 10.0


class ChatError(Exception):
    """The server refused or cannot be reached; the message is for the user."""


class ChatServer:
    """One server and model; a context manager that owns the connection."""

    def __init__(
        self, url: str, api_key: str, model: str, options: Mapping[str, Any] | None = None
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._http = httpx.Client(base_url=base_url(url), headers=headers, timeout=timeout)
        self._model = model
        self._options = {
            name: value for name, value in (options or {}).items() if value is not None
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def model(self) -> str:
        """The model's id, asked from the server if none was given. Raises `ChatError`."""
        if not self._model:
            try:
                response = self._http.get("models")
            except httpx.HTTPError as error:
                raise ChatError(f"cannot reach {self._http.base_url}: {error}") from error
            if response.is_error:
                raise ChatError(_message(response))
            try:
                self._model = str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ChatError("the server lists no model; name one with --model") from error
        return self._model

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Pieces of the next answer. Raises `ChatError`."""
        body = {"model": self.model(), "messages": messages, "stream": True, **self._options}
        try:
            with self._http.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ChatError(_message(response))
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        yield from _pieces(line.removeprefix("data:").strip())
        except httpx.HTTPError as error:
            raise ChatError(f"the connection failed: {error}") from error


def converse(server: ChatServer, console: Console, system: str = "") -> int:
    """Read turns until the user leaves; the exit code."""
    try:
        console.print(f"talking to {server.model()}; {HELP}", markup=False, highlight=False)
    except ChatError as error:
        console.print(f"error: {error}", markup=False, style="red")
        return 1
    conversation = _opening(system)
    while True:
        try:
            line = console.input("[bold]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        command, _, rest = line.partition(" ")
        if command == "/exit":
            return 0
        if command == "/reset":
            conversation = _opening(system)
        elif command == "/system":
            system = rest.strip()
            conversation = _opening(system)
        elif command.startswith("/"):
            console.print(HELP, markup=False, highlight=False)
        elif line:
            _turn(server, console, conversation, line)


def _turn(
    server: ChatServer, console: Console, conversation: list[dict[str, str]], line: str
) -> None:
    """One question and its answer; a failed turn leaves the conversation as it was."""
    conversation.append({"role": "user", "content": line})
    answer = ""
    try:
        for piece in server.answer(conversation):
            answer += piece
            shown = "".join(c for c in piece if c.isprintable() or c in "\n\t")
            console.print(shown, end="", markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [stopped]", end="", markup=False)
    except ChatError as error:
        console.print(f"error: {error}", markup=False, style="red")
        answer = ""
    console.print()
    if answer:
        conversation.append({"role": "assistant", "content": answer})
    else:
        conversation.pop()


def _opening(system: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _pieces(payload: str) -> Iterator[str]:
    """The text of one event. Servers differ in what they leave out or null. Raises `ChatError`."""
    if payload in ("", "[DONE]"):
        return
    try:
        chunk = json.loads(payload)
    except ValueError as error:
        raise ChatError(f"the server sent what is no JSON: {payload[:80]!r}") from error
    if not isinstance(chunk, dict):
        raise ChatError(f"the server sent what is no chunk: {payload[:80]!r}")
    if problem := chunk.get("error"):
        message = problem.get("message") if isinstance(problem, dict) else None
        raise ChatError(str(message or problem))
    for choice in chunk.get("choices") or ():
        if text := (choice.get("delta") or {}).get("content"):
            yield text


def _message(response: httpx.Response) -> str:
    """The server's own words if it has OpenAI's error shape."""
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"
