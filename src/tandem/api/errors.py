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
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

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

CLIENT_CLOSED_REQUEST = 499  # nginx's status; nobody receives it, but logs and metrics do


class BodyTooLarge(InvalidRequest):
    """The body has more bytes than the server takes."""


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


def failure(error: Exception) -> Failure:
    """How `error` is told to the client; what we did not raise on purpose stays vague."""
    match error:
        case BodyTooLarge():
            closing = {"connection": "close"}  # the rest of the body is not worth reading
            return _failure(413, error, error.param, "body_too_large", headers=closing)
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
            return _failure(500, unknown, None, "internal_error", "server_error")


async def on_tandem_error(_: Request, error: Exception) -> Response:
    """Our own errors."""
    return failure(error).response()


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods, which the router raises."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:200]}"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"unknown route: {what}; docs/api.md lists all routes"
        return _failure(404, message, None, "unknown_url").response()
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{what} is not allowed; allowed: {allowed}"
        headers = {"allow": allowed}
        return _failure(405, message, None, "method_not_allowed", headers=headers).response()
    return _failure(error.status_code, str(error.detail), None, None).response()


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


async def on_unexpected_error(_: Request, error: Exception) -> Response:
    """A bug. The server logs the traceback, without the body."""
    return failure(error).response()


def _failure(
    status: int,
    message: object,
    param: str | None,
    code: str | None,
    kind: str = "invalid_request_error",
    headers: dict[str, str] | None = None,
) -> Failure:
    body = {"error": {"message": str(message), "type": kind, "param": param, "code": code}}
    return Failure(status, body, headers or {})


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
