"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Maps our error tree onto HTTP. Invariant: no message shows a traceback, a key or a body.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route

from tandem.api.fields import NOT_SERVED
from tandem.core.errors import (
    Conflict,
    EngineDead,
    Forbidden,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    Overloaded,
    QuotaExceeded,
    StoreError,
    TandemError,
    Unauthorized,
    WrongStatus,
)

_log = logging.getLogger(__name__)
_STORE_RETRY_S = 5.0
_MOST_MESSAGE_CHARS = 2000

MESSAGES = "/v1/messages"
"""Anthropic's route; its errors, and those below it, have Anthropic's shape."""
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
CLIENT_CLOSED_REQUEST = 499  # nginx's status; nobody receives it, but logs and metrics do


class BodyTooLarge(InvalidRequest):
    """The body has more bytes than the server takes."""


class TooSlow(TandemError):
    """The client does not send what it began to send."""


class UnsupportedMedia(InvalidRequest):
    """The body is not of the type that the route takes."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as clients see it."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    def response(self) -> Response:
        """The whole answer of a request that failed before anything was sent."""
        return Response(
            msgspec.json.encode(self.body),
            status_code=self.status,
            headers=self.headers,
            media_type="application/json",
        )

    def told_on(self, path: str) -> Failure:
        """The same in the shape of the route: Anthropic's on /v1/messages."""
        if path != MESSAGES and not path.startswith(f"{MESSAGES}/"):
            return self
        said = self.body["error"]
        message = str(said["message"])
        if said["code"] == "context_length_exceeded":  # by these words clients know it
            message = f"prompt is too long: {message}"
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else said["type"])
        body = {"type": "error", "error": {"type": kind, "message": message}}
        return Failure(self.status, body, self.headers)


def failure(error: Exception) -> Failure:  # noqa: C901
    """How `error` is told to the client; what we did not raise on purpose stays vague."""
    match error:
        case BodyTooLarge():
            closing = {"connection": "close"}  # the rest of the body is not worth reading
            return _failure(413, error, error.param, "body_too_large", headers=closing)
        case TooSlow():
            closing = {"connection": "close"}
            return _failure(408, error, None, "request_timeout", headers=closing)
        case UnsupportedMedia():
            return _failure(415, error, error.param, "unsupported_media_type")
        case WrongStatus():
            return _failure(400, error, error.param, error.code or "conflict")
        case Conflict():
            # Without this, the `openai` client tries every 409 again; none goes away by itself.
            final = {"x-should-retry": "false"}
            return _failure(409, error, error.param, error.code or "conflict", headers=final)
        case NotFound():
            return _failure(404, error, error.param, error.code or "not_found")
        case InvalidRequest():
            return _failure(400, error, error.param, error.code)
        case Unauthorized():
            challenge = {"www-authenticate": "Bearer"}
            return _failure(401, error, None, "invalid_api_key", headers=challenge)
        case Forbidden():
            return _failure(403, error, None, "forbidden", "permission_error")
        case QuotaExceeded():
            wait = _retry_after(error.retry_after_s)
            return _failure(429, error, None, "rate_limit_exceeded", "rate_limit_error", wait)
        case StoreError():
            _log.error("the store failed", exc_info=error)
            unsaved = "the server cannot read or save its state now; its log has the details"
            wait = _retry_after(_STORE_RETRY_S)
            return _failure(503, unsaved, None, "store_unavailable", "server_error", wait)
        case Overloaded():
            wait = _retry_after(error.retry_after_s)
            return _failure(429, error, None, "overloaded", "rate_limit_error", wait)
        case EngineDead():
            wait = _retry_after(error.retry_after_s)
            return _failure(503, error, None, "engine_unavailable", "server_error", wait)
        case OutOfMemory():
            wait = _retry_after(error.retry_after_s)
            return _failure(503, error, None, "out_of_memory", "server_error", wait)
        case TandemError():
            return _failure(500, error, None, "generation_failed", "server_error")
        case _:
            unknown = "internal error; the server's log has the details"
            closing = {"connection": "close"}  # what was read of the request is not known
            return _failure(500, unknown, None, "internal_error", "server_error", closing)


async def on_tandem_error(request: Request, error: Exception) -> Response:
    """Our own errors."""
    return failure(error).told_on(request.url.path).response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods, which the router raises."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    return _of_router(request, error, path).told_on(path).response()


def _of_router(request: Request, error: HTTPException, path: str) -> Failure:
    what = f"{request.method} {path[:200]}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        for prefix, advice in NOT_SERVED.items():
            if path == prefix or path.startswith(f"{prefix}/"):
                message = f"{prefix} is not supported by this server: {advice}"
                return _failure(404, message, None, "not_supported")
        message = f"unknown route: {what}; docs/api.md lists all routes"
        return _failure(404, message, None, "unknown_url")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = _allowed(request)
        message = f"{what} is not allowed; allowed: {allowed}"
        headers = {"allow": allowed}
        return _failure(405, message, None, "method_not_allowed", headers=headers)
    return _failure(error.status_code, str(error.detail), None, None)


def _allowed(request: Request) -> str:
    """The methods of all routes with this path; the router's own error names one route's."""
    app: Starlette = request.app
    found: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    if "GET" in found:
        found.add("HEAD")
    return ", ".join(sorted(found))


async def on_invalid_path(_: Request, error: Exception) -> Response:
    """A part of the path that is not what the route takes, such as a version that is no number."""
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    message = str(first["msg"])
    name = str(first["loc"][-1])
    told = f"'{name}': {message[0].lower()}{message[1:]}"
    return _failure(400, told, name, None).response()


async def on_leave(_: Request, error: Exception) -> Response:
    """The client went away while it sent its body."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _failure(
    status: int,
    message: object,
    param: str | None,
    code: str | None,
    kind: str = "invalid_request_error",
    headers: dict[str, str] | None = None,
) -> Failure:
    told = str(message)
    if len(told) > _MOST_MESSAGE_CHARS:  # some repeat what was sent
        told = f"{told[:_MOST_MESSAGE_CHARS]}..."
    body = {"error": {"message": told, "type": kind, "param": param, "code": code}}
    return Failure(status, body, headers or {})


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
