"""The route of OpenAI's newer dialect: /v1/responses.

Invariant: what answers here is the same chat that /v1/chat/completions would be sent.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import FastAPI, Request, Response

from tandem.api.connection import read, until_disconnect
from tandem.api.generation import caller_of, chat_options, take_objectives
from tandem.api.respond import Wants, respond
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
        chat = body.chat()
        take_objectives(chat, request)
        caller = await caller_of(request, surface, chat)
        options = chat_options(chat, caller)
        sampling = replace(options.sampling, grammar=body.grammar())
        options = replace(options, sampling=sampling, ceiling=True)

        async def work() -> Response:
            answer = await surface.generation.chat(body.turns(), options, _ID_PREFIX)
            return await respond(surface, answer, ResponsesDialect(body), Wants(bool(body.stream)))

        return await until_disconnect(request, work())
