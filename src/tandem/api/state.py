"""Routes about the server itself: /health, /ready, /metrics and /openapi.json.

Invariant: /health is 200 only while an engine process lives, /ready only while the engine takes
requests.
"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import FastAPI, Request, Response

from tandem.api.connection import as_json
from tandem.api.errors import failure
from tandem.api.specification import specification
from tandem.api.surface import Surface
from tandem.core.errors import EngineDead
from tandem.core.events import EngineStats
from tandem.core.ports import EngineState, ServingEngine
from tandem.services.auth import Caller
from tandem.telemetry.metrics import CONTENT_TYPE

_HEALTHY = (EngineState.READY, EngineState.QUIET, EngineState.DRAINING)
_RETRY_AFTER_S = 5.0
# Scrapers of metrics give up after some 10 s.
_OTHERS_TIMEOUT_S = 2.0


def add_state_routes(app: FastAPI, surface: Surface) -> None:
    """Add the state routes."""
    document = b""

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine lives, 503 while it is dead or restarts."""
        return _state(surface.client.state, surface.client.state in _HEALTHY)

    @app.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken; 503 also while the server drains or the engine is quiet."""
        return _state(surface.client.state, surface.client.state is EngineState.READY)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        """OpenAPI document of these routes."""
        nonlocal document
        document = document or msgspec.json.encode(specification(app))
        return Response(document, media_type="application/json")

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus' text format; of adapters, those that the caller may see."""
        caller: Caller = request.state.caller
        main, *others = await asyncio.gather(
            _stats(surface.client), *(_stats_soon(each) for each in surface.others.values())
        )
        named = dict(zip(surface.others, others, strict=True))
        return Response(
            surface.metrics.render(main, named, caller.may_see), media_type=CONTENT_TYPE
        )


async def _stats(engine: ServingEngine) -> EngineStats | None:
    """None while it is dead."""
    try:
        return await engine.stats()
    except EngineDead:
        return None


async def _stats_soon(engine: ServingEngine) -> EngineStats | None:
    """None also while it is away or late: it must not hide the numbers of the main engine."""
    if engine.state not in (EngineState.READY, EngineState.DRAINING):
        return None
    try:
        async with asyncio.timeout(_OTHERS_TIMEOUT_S):
            return await _stats(engine)
    except TimeoutError:
        return None


def _state(state: EngineState, good: bool) -> Response:
    if good:
        return as_json({"status": state})
    message = f"the engine is {state.value}; try again later"
    return failure(EngineDead(message, retry_after_s=_RETRY_AFTER_S)).response()
