"""`tandem chat`: the wire to any OpenAI-compatible server, and feedback to one of ours.

Streams answers and notes which completion and which version they were. Keeps no conversation
(`conversation`). Invariant: what a server sends that is no answer is a `ChatError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from tandem.cli.remote import authorization, base_url

_ADAPTER_HEADER = "x-tandem-adapter"
BASE = "base"
_CONNECT_TIMEOUT_S = 10.0


class ChatError(Exception):
    """The server refused or cannot be reached; the message is for the user. `param` is what the
    server refused of the body, if it says so."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class ChatServer:
    """One server and model; a context manager that owns the connection.

    After an answer, `completion_id` and `version` say what it was: the version of an adapter such
    as `formal@2`, or `base`; empty where the server does not tell. `ended`: whether it is whole, as
    far as the server tells. Raises `typer.BadParameter` for a URL or a key that cannot be one.
    """

    def __init__(
        self, url: str, api_key: str, model: str, options: Mapping[str, Any] | None = None
    ) -> None:
        headers = authorization(api_key)
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self._http = httpx.Client(base_url=base_url(url), headers=headers, timeout=timeout)
        self._model = model
        self.completion_id = ""
        self.version = ""
        self.ended = False
        self._reason = ""
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
            self._model = self._models()[0]
        return self._model

    def learn_as(self, adapter: str) -> str:
        """Talk to `adapter` from now on, or to the base until it is there; the model's id.

        Raises `ChatError`.
        """
        models = self._models()
        theirs = [each for each in models if each.endswith(f":{adapter}")]
        self._model = theirs[0] if theirs else models[0]
        return self._model

    def answer(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """Pieces of the next answer. Raises `ChatError`."""
        body = {"model": self.model(), "messages": messages, "stream": True, **self._options}
        self.completion_id = self.version = ""
        self.ended, self._reason = False, ""
        try:
            with self._http.stream("POST", "chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise _error(response)
                self.version = response.headers.get(_ADAPTER_HEADER, "")
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        yield from self._pieces(line.removeprefix("data:").strip())
            self.ended = self._reason in ("", "stop")
        except httpx.HTTPError as error:
            raise ChatError(f"the connection failed: {error}") from error

    def send_feedback(self, body: dict[str, Any]) -> dict[str, Any]:
        """Say what an answer is worth; what is stored of it. Raises `ChatError`."""
        stored = self._json("POST", "feedback", json=body)
        self._model = str(stored.get("model") or self._model)
        return stored

    def _models(self) -> list[str]:
        """At least one id. Raises `ChatError`."""
        listed = self._json("GET", "models")
        try:
            ids = [str(model["id"]) for model in listed["data"]]
        except (LookupError, TypeError):
            ids = []
        if not ids:
            raise ChatError("the server lists no model; name one with --model")
        return ids

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """The object that a route answers; an empty one for anything else."""
        try:
            response = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ChatError(f"cannot reach {self._http.base_url}: {error}") from error
        if response.is_error:
            raise _error(response)
        try:
            found = response.json()
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _pieces(self, payload: str) -> Iterator[str]:
        """The text of one event; notes which completion it belongs to. Raises `ChatError`."""
        chunk = _chunk(payload)
        if chunk.get("id"):
            self.completion_id = str(chunk["id"])
        for choice in chunk.get("choices") or ():
            if text := (choice.get("delta") or {}).get("content"):
                yield text
            self._reason = str(choice.get("finish_reason") or self._reason)


def _chunk(payload: str) -> dict[str, Any]:
    """One event. Servers differ in what they leave out or null. Raises `ChatError`."""
    if payload in ("", "[DONE]"):
        return {}
    try:
        chunk = json.loads(payload)
    except ValueError as error:
        raise ChatError(f"the server sent what is no JSON: {payload[:80]!r}") from error
    if not isinstance(chunk, dict):
        raise ChatError(f"the server sent what is no chunk: {payload[:80]!r}")
    if problem := chunk.get("error"):
        message = problem.get("message") if isinstance(problem, dict) else None
        raise ChatError(str(message or problem))
    return chunk


def _error(response: httpx.Response) -> ChatError:
    """The server's own words if it has OpenAI's error shape."""
    try:
        problem = response.json()["error"]
        message, param = f"{response.status_code}: {problem['message']}", problem.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ChatError(f"the server answered {response.status_code} {response.reason_phrase}")
    return ChatError(message, str(param or ""))
