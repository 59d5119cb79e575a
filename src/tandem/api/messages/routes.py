"""Routes of Anthropic's dialect: /v1/messages and /v1/messages/count_tokens.

Invariant: what answers here is the same chat that /v1/chat/completions would be sent.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from fastapi import FastAPI, Request, Response

from tandem.api.connection import read, until_disconnect
from tandem.api.errors import MESSAGES
from tandem.api.generation import caller_of, chat_options, take_objectives
from tandem.api.messages.render import MessagesDialect
from tandem.api.messages.schemas import CountRequest, MessagesRequest
from tandem.api.respond import Wants, respond
from tandem.api.surface import Surface

_ID_PREFIX = "msg_"


def add_messages_routes(app: FastAPI, surface: Surface) -> None:
    """Add /v1/messages."""

    @app.post(MESSAGES)
    async def create_message(request: Request) -> Response:
        """Answer a conversation, in Anthropic's shape."""
        body = await read(MessagesRequest, request, surface.bodies)
        chat = body.chat()
        take_objectives(chat, request)
        caller = await caller_of(request, surface, chat)
        options = chat_options(chat, caller)
        sampling = replace(options.sampling, grammar=body.grammar())
        options = replace(options, sampling=sampling, ceiling=True)

        async def work() -> Response:
            answer = await surface.generation.chat(body.turns(), options, _ID_PREFIX)
            return await respond(surface, answer, MessagesDialect(), Wants(bool(body.stream)))

        return await until_disconnect(request, work())

    @app.post(f"{MESSAGES}/count_tokens")
    async def count_message_tokens(request: Request) -> Response:
        """How many tokens a conversation has."""
        body = await read(CountRequest, request, surface.bodies)
        chat = body.chat()
        options = chat_options(chat, await caller_of(request, surface, chat))
        tokens = await surface.generation.encode_chat(
            body.turns(),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=options.calling.tools,
        )
        found = msgspec.json.encode({"input_tokens": len(tokens)})
        return Response(found, media_type="application/json")
