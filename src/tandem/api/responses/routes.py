"""The route of OpenAI's newer dialect: /v1/responses.

Invariant: what answers here is the same chat that /v1/chat/completions would be sent.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from tandem.api.connection import read
from tandem.api.generation import answer_as_chat
from tandem.api.responses.render import ResponsesDialect
from tandem.api.responses.schemas import ResponsesRequest
from tandem.api.surface import Surface

_ID_PREFIX = "resp_"


def add_responses_routes(app: FastAPI, surface: Surface) -> None:
    """Add /v1/responses."""

    @app.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        """Answer a conversation, in the shape of OpenAI's Responses API."""
        body = await read(ResponsesRequest, request, surface.bodies)
        return await answer_as_chat(request, surface, body, ResponsesDialect(body), _ID_PREFIX)
