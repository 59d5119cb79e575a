"""Around every request: who may come in, the API key, an id, one log line, one count.

A plain ASGI layer, so that streams pass through untouched and routes that do not exist are guarded
too. Invariant: without a valid key nothing but the open routes and an allowed preflight answers,
and bodies, queries and headers never reach the log (but for the id).
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.api.bodies import Bodies
from tandem.api.entrance import Entrance, check_media
from tandem.api.errors import CLIENT_CLOSED_REQUEST, failure
from tandem.core.errors import InvalidRequest, TandemError
from tandem.services.auth import ApiKeys, Caller
from tandem.telemetry.metrics import ServerMetrics

PAGE_FILES = "/page/"
OPEN_ROUTES = frozenset({"/health", "/ready", "/", PAGE_FILES + "{file}"})
"""What needs no key, as routes are written."""
REQUEST_ID = "x-request-id"
_log = logging.getLogger(__name__)

# Clients choose the method; as a label it must not be endless.
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Guard:
    """Checks senders and keys and tells what happened; the `Caller` goes into the request's
    state."""

    def __init__(
        self,
        app: ASGIApp,
        entrance: Entrance,
        bodies: Bodies,
        keys: ApiKeys,
        metrics: ServerMetrics,
    ) -> None:
        self._app = app
        self._entrance = entrance
        self._bodies = bodies
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":  # of anything else there is none
                await self._app(scope, receive, send)
            return
        begun_s, method = time.monotonic(), scope["method"]
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        added = [
            (REQUEST_ID.encode(), request_id.encode()),
            *self._entrance.answer_headers(headers),
        ]
        status, started, scope = CLIENT_CLOSED_REQUEST, False, _plain(scope)

        async def watched(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            await self._admit(scope, receive, watched)
        except Exception as error:
            status = 500
            if started:
                raise
            _log.error("a request failed", extra={"fields": {"id": request_id}}, exc_info=error)
            told = failure(error).told_on(scope["path"])
            await told.response()(scope, receive, watched)
        finally:
            self._tell(scope, method, status, request_id, time.monotonic() - begun_s)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, caller = Headers(scope=scope), Caller()
        try:
            self._entrance.check_sender(scope, headers)
            granted = self._entrance.preflight(scope, headers)
            if granted is not None:
                await Response(status_code=204, headers=granted)(scope, receive, send)
                return
            if not _is_open(scope["path"]):
                given = headers.get("authorization"), headers.get("x-api-key")
                caller = self._keys.caller_of(*given)
            check_media(scope, headers)
            _check_target(scope)
        except TandemError as error:
            await failure(error).told_on(scope["path"]).response()(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        with self._bodies.taking(scope, receive) as taking:
            await self._app(scope, taking, send)

    def _tell(
        self, scope: Scope, method: str, status: int, request_id: str, elapsed_s: float
    ) -> None:
        route = scope["route"].path if "route" in scope else "unknown"
        label = method if method in _METHODS else "other"
        self._metrics.http.labels(label, route, str(status)).inc()
        if status >= 400:
            self._metrics.http_errors.labels(str(status)).inc()
        fields = {
            "id": request_id,
            "method": method,
            "route": route,
            "status": status,
            "elapsed_s": elapsed_s,
        }
        _log.info("http", extra={"fields": fields})


def _is_open(path: str) -> bool:
    return path in OPEN_ROUTES or path.startswith(PAGE_FILES)


def _request_id(headers: Headers) -> str:
    """The client's own id of the request, if it can stand in a header and a log; else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _plain(scope: Scope) -> Scope:
    """The scope as routes know it: a path without scheme, host and last slash; GET for HEAD (the
    server leaves the body out)."""
    path, headers = scope["path"], scope["headers"]
    if not path.startswith("/"):
        with suppress(ValueError):  # "http://[" is no target, and no route
            target = urlsplit(scope.get("raw_path", b"").decode("latin-1"))
            if target.scheme in ("http", "https") and target.netloc:
                # By RFC 9112 the target's host stands for that of the header.
                path = unquote(target.path) or "/"
                others = [pair for pair in headers if pair[0] != b"host"]
                headers = [(b"host", target.netloc.encode("latin-1")), *others]
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    path = path.rstrip("/") or "/"
    return {**scope, "method": method, "path": path, "headers": headers}


def _check_target(scope: Scope) -> None:
    """No database can look for what holds a null character."""
    if "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
        raise InvalidRequest("the URL must not hold a null character (%00)", code="invalid_url")
