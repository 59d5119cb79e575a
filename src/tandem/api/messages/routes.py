"""Routes of Anthropic's dialect: /v1/messages and /v1/messages/count_tokens.

Invariant: what answers here is the same chat that /v1/chat/completions would be sent.
"""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request, Response

from tandem.api.connection import read
from tandem.api.errors import MESSAGES
from tandem.api.generation import answer_as_chat, caller_of, chat_options
from tandem.api.messages.render import MessagesDialect
from tandem.api.messages.schemas import CountRequest, MessagesRequest
from tandem.api.surface import Surface

_ID_PREFIX = "msg_"


def add_messages_routes(app: FastAPI, surface: Surface) -> None:
    """Add /v1/messages."""

    @app.post(MESSAGES)
    async def create_message(request: Request) -> Response:
        """Answer a conversation, in Anthropic's shape."""
        body = await read(MessagesRequest, request, surface.bodies)
        return await answer_as_chat(request, surface, body, MessagesDialect(), _ID_PREFIX)

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
