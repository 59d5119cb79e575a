"""Routes about the server itself: /health, /ready, /metrics and /openapi.json.

Invariant: /health is 200 only while an engine process lives, /ready only while the engine takes
requests.
"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import FastAPI, Request, Response

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
        engines = (surface.client, *surface.others.values())
        main, *others = await asyncio.gather(*(_stats(engine) for engine in engines))
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


def _state(state: EngineState, good: bool) -> Response:
    if good:
        return Response(msgspec.json.encode({"status": state}), media_type="application/json")
    message = f"the engine is {state.value}; try again later"
    return failure(EngineDead(message, retry_after_s=_RETRY_AFTER_S)).response()
