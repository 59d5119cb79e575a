"""The FastAPI application, joined from its groups of routes.

Constructs nothing that lives longer than a request; everything it works with is handed in.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tandem.api.errors import on_http_error, on_leave, on_tandem_error, on_unexpected_error
from tandem.api.generation import add_generation_routes
from tandem.api.guard import Guard
from tandem.api.models import add_adapter_routes, add_model_routes
from tandem.api.state import add_state_routes
from tandem.api.surface import Surface
from tandem.core.errors import TandemError


def create_app(surface: Surface) -> FastAPI:
    """An application that serves `surface`. The engine is started and closed by the caller."""
    app = FastAPI(
        title="Tandem",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        exception_handlers={
            TandemError: on_tandem_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_leave,
            Exception: on_unexpected_error,
        },
    )
    app.add_middleware(Guard, keys=surface.keys, metrics=surface.metrics)
    for add_routes in (
        add_generation_routes,
        add_model_routes,
        add_adapter_routes,
        add_state_routes,
    ):
        add_routes(app, surface)
    return app
