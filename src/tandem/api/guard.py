"""Around every request: the API key, one log line, one count.

A plain ASGI layer, so that streams pass through untouched and routes that do not exist need a key
too. Invariant: without a valid key nothing but the open routes answers, and bodies, queries and
headers never reach the log.
"""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.api.errors import CLIENT_CLOSED_REQUEST, failure
from tandem.core.errors import Unauthorized
from tandem.services.auth import ApiKeys, Caller
from tandem.telemetry.metrics import ServerMetrics

OPEN_ROUTES = frozenset({"/health", "/ready"})
_log = logging.getLogger(__name__)

# Clients choose the method; as a label it must not be endless.
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class Guard:
    """Checks keys and tells what happened; the `Caller` goes into the request's state."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: ServerMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status = CLIENT_CLOSED_REQUEST

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._admit(scope, receive, watched)
        except Exception:
            status = 500  # answered further out
            raise
        finally:
            self._tell(scope, status, time.monotonic() - begun_s)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = Caller()
        if scope["path"] not in OPEN_ROUTES:
            try:
                caller = self._keys.caller_of(Headers(scope=scope).get("authorization"))
            except Unauthorized as error:
                await failure(error).response()(scope, receive, send)
                return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    def _tell(self, scope: Scope, status: int, elapsed_s: float) -> None:
        route = scope["route"].path if "route" in scope else "unknown"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.http.labels(method, route, str(status)).inc()
        if status >= 400:
            self._metrics.http_errors.labels(str(status)).inc()
        fields = {
            "method": scope["method"],
            "route": route,
            "status": status,
            "elapsed_s": elapsed_s,
        }
        _log.info("http", extra={"fields": fields})
