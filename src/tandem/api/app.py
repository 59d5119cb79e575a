"""The FastAPI application, joined from its groups of routes.

Constructs nothing that lives longer than a request; everything it works with is handed in.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from tandem.api.adapters import add_adapter_routes
from tandem.api.batches import add_batch_routes
from tandem.api.errors import (
    on_http_error,
    on_invalid_path,
    on_leave,
    on_tandem_error,
)
from tandem.api.feedback import add_feedback_routes
from tandem.api.files import add_file_routes
from tandem.api.fine_tuning import add_fine_tuning_routes
from tandem.api.generation import add_generation_routes
from tandem.api.guard import Guard
from tandem.api.messages.routes import add_messages_routes
from tandem.api.models import add_model_routes
from tandem.api.page import add_page_routes
from tandem.api.responses.routes import add_responses_routes
from tandem.api.state import add_state_routes
from tandem.api.stats import add_stats_routes
from tandem.api.surface import Surface
from tandem.core.errors import TandemError


def create_app(
    surface: Surface, running: AbstractAsyncContextManager[None] | None = None
) -> FastAPI:
    """An application that serves `surface`. The engine is started and closed by the caller.

    `running` is entered before the first request and left after the last one.
    """
    app = FastAPI(
        title="Tandem",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=None if running is None else lambda _: running,
        exception_handlers={
            TandemError: on_tandem_error,
            HTTPException: on_http_error,
            RequestValidationError: on_invalid_path,
            ClientDisconnect: on_leave,
        },
    )
    app.add_middleware(
        Guard,
        entrance=surface.entrance,
        bodies=surface.bodies,
        keys=surface.keys,
        metrics=surface.metrics,
    )
    app.state.batches = surface.batches
    for add_routes in (
        add_generation_routes,
        add_messages_routes,
        add_responses_routes,
        add_model_routes,
        add_adapter_routes,
        add_feedback_routes,
        add_file_routes,
        add_batch_routes,
        add_fine_tuning_routes,
        add_stats_routes,
        add_state_routes,
        add_page_routes,
    ):
        add_routes(app, surface)
    return app
