"""Routes about models: list, look up, tokenize, detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request, Response

from tandem.api.adapters import forget
from tandem.api.connection import as_json, read, who_asks
from tandem.api.generation import asks
from tandem.api.schemas import DetokenizeRequest, TokenizeRequest
from tandem.api.surface import Surface
from tandem.api.tools import calling_of
from tandem.core.errors import InvalidRequest
from tandem.services.answering.models import ServedModel


def add_model_routes(app: FastAPI, surface: Surface) -> None:  # noqa: C901
    """Add /v1/models, /tokenize and /detokenize."""

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        """The base model and one model for each adapter, of those that the caller may see."""
        found = surface.models.listed(who_asks(request))
        return as_json({"object": "list", "data": [_model_json(surface, each) for each in found]})

    @app.get("/v1/models/{model:path}")
    async def retrieve_model(model: str, request: Request) -> Response:
        """One of them, or a checkpoint of one of the caller's jobs."""
        return as_json(_model_json(surface, await _resolved(surface, request, model)))

    @app.delete("/v1/models/{model:path}")
    async def delete_model(model: str, request: Request) -> Response:
        """Forget a fine-tuned model: the adapter of this name, with its versions."""
        who_asks(request).require_admin()
        found = await _resolved(surface, request, model)
        if found.name is None or found.checkpoint:
            what = "a checkpoint" if found.checkpoint else "the base model"
            raise InvalidRequest(
                f"{what} cannot be deleted, only an adapter with all that is its own", param="model"
            )
        await forget(surface, found.name)
        return as_json({"id": model, "object": "model", "deleted": True})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Kind of tokenizer, special tokens, chat template."""
        return as_json(surface.generation.tokenizer_description())

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of a rendered conversation."""
        body = await read(TokenizeRequest, request, surface.bodies)
        if body.model is not None:
            await _resolved(surface, request, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either 'prompt' or 'messages'", param="prompt")
        if body.messages is not None:
            turns = [message.rendered() for message in body.messages]
            tokens = await surface.generation.encode_chat(
                turns,
                add_generation_prompt=asks(body),
                continue_final_message=bool(body.continue_final_message),
                tools=calling_of(body.tools, None, None).tools,
            )
        else:
            tokens = await surface.generation.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens
            )
        limit = surface.client.info.max_model_len
        return as_json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Text of token ids, without special tokens."""
        body = await read(DetokenizeRequest, request, surface.bodies)
        if body.model is not None:
            await _resolved(surface, request, body.model)
        text = await asyncio.to_thread(surface.generation.decode, body.tokens)
        return as_json({"prompt": text})


async def _resolved(surface: Surface, request: Request, model: str) -> ServedModel:
    return await surface.models.resolve(model, request.state.caller)


def _model_json(surface: Surface, model: ServedModel) -> dict[str, Any]:
    version = model.adapter
    return {
        "id": model.id,
        "object": "model",
        "created": surface.models.created_s,
        "owned_by": "tandem",
        "root": model.base,
        "parent": model.base if model.name else None,
        "max_model_len": model.max_model_len,
        "adapter": model.checkpoint or (version.label if version else None),
    }
