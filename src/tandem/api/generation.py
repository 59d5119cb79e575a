"""Routes that generate: /v1/chat/completions and /v1/completions.

Turns a parsed body into the service's options; other dialects come here with their bodies as chats.
Invariant: what a body asks for is in the options, or was refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response

from tandem.api.connection import read, until_disconnect
from tandem.api.render import ChatShape, CompletionShape, Extras, OpenAIDialect
from tandem.api.respond import Dialect, Wants, respond
from tandem.api.schemas import (
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    TokenizeRequest,
    slo_of_header,
)
from tandem.api.structured import grammar_of
from tandem.api.surface import Surface
from tandem.api.tools import calling_of
from tandem.core.errors import InvalidRequest
from tandem.core.sampling import Grammar, SamplingParams
from tandem.core.slo import WorkClass
from tandem.services.answering.generation import Options
from tandem.services.answering.receipts import Receipts
from tandem.services.auth import Caller

TTFT_HEADER, TPOT_HEADER = "x-tandem-ttft-slo", "x-tandem-tpot-slo"
DEFAULT_COMPLETION_TOKENS = 16
Sampled = TypeVar("Sampled", bound=SamplingFields)


def add_generation_routes(app: FastAPI, surface: Surface) -> None:
    """Add the generating routes."""

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = await _body(request, surface, ChatRequest)
        options = chat_options(body, await caller_of(request, surface, body))
        wants = wants_of(body, logprobs=bool(body.logprobs))

        async def work() -> Response:
            turns = [message.rendered() for message in body.messages]
            answer = await surface.generation.chat(turns, options)
            return await respond(surface, answer, OpenAIDialect(ChatShape(), wants.extras), wants)

        return await until_disconnect(request, work())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue one or several prompts."""
        body = await _body(request, surface, CompletionRequest)
        options = completion_options(body, await caller_of(request, surface, body))
        wants = wants_of(body, logprobs=body.logprobs is not None)

        async def work() -> Response:
            answer = await surface.generation.complete(body.prompt, options)
            dialect = OpenAIDialect(CompletionShape(), wants.extras)
            return await respond(surface, answer, dialect, wants)

        return await until_disconnect(request, work())


class AsChat(Protocol):
    """The body of another dialect, which is a chat in other words."""

    stream: bool | None

    def chat(self) -> ChatRequest:
        """What it asks for, without its turns."""
        ...

    def turns(self) -> list[dict[str, Any]]:
        """The conversation, as chat templates take it."""
        ...

    def grammar(self) -> Grammar | None:
        """What the answer must match."""
        ...


async def answer_as_chat(
    request: Request, surface: Surface, body: AsChat, dialect: Dialect, id_prefix: str
) -> Response:
    """Answer a body of another dialect; its limit of tokens is a ceiling."""
    chat = body.chat()
    take_objectives(chat, request)
    options = chat_options(chat, await caller_of(request, surface, chat))
    sampling = replace(options.sampling, grammar=body.grammar())
    options = replace(options, sampling=sampling, ceiling=True)

    async def work() -> Response:
        answer = await surface.generation.chat(body.turns(), options, id_prefix)
        wants = Wants(bool(body.stream), tier=_tier(chat.service_tier))
        return await respond(surface, answer, dialect, wants)

    return await until_disconnect(request, work())


async def _body(request: Request, surface: Surface, kind: type[Sampled]) -> Sampled:
    """The checked body, with the objectives of the headers where it has none."""
    body = await read(kind, request, surface.bodies)
    take_objectives(body, request)
    return body


def take_objectives(body: SamplingFields, request: Request) -> None:
    """Put the objectives of the headers where a body has none. Raises `InvalidRequest`."""
    headers = request.headers
    if body.ttft_slo is None and TTFT_HEADER in headers:
        body.ttft_slo = slo_of_header(TTFT_HEADER, headers[TTFT_HEADER])
    if body.tpot_slo is None and TPOT_HEADER in headers:
        body.tpot_slo = slo_of_header(TPOT_HEADER, headers[TPOT_HEADER])


async def caller_of(request: Request, surface: Surface, body: SamplingFields) -> Caller:
    """Who asks. Raises `NotFound` for an unknown model, `Forbidden` for one of others."""
    caller: Caller = request.state.caller
    caller.require_serve((await surface.models.resolve(body.model, caller)).name)
    require_storable(body, surface.receipts)
    return caller


def require_storable(body: SamplingFields, receipts: Receipts) -> None:
    """Raise `InvalidRequest` where an answer is to be kept and cannot be."""
    if body.store and not receipts.enabled:
        raise InvalidRequest(
            "'store' is not possible: this server keeps no receipts (store.receipt_days is 0)",
            param="store",
        )


def wants_of(body: SamplingFields, *, logprobs: bool) -> Wants:
    """Raises `InvalidRequest` for options that say nothing without a stream."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequest(
            "'stream_options' is allowed only with stream=true", param="stream_options"
        )
    extras = Extras(
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        usage=bool(options and options.include_usage),
        running_usage=bool(options and options.include_usage and options.continuous_usage_stats),
    )
    return Wants(bool(body.stream), body.n or 1, extras, _tier(body.service_tier))


def _tier(asked: str | None) -> str:
    """The service tier of an answer; empty if none was asked for."""
    return "" if asked is None else "flex" if asked == "flex" else "default"


def asks(body: ChatRequest | TokenizeRequest) -> bool:
    """Whether a conversation is rendered up to the beginning of an answer. Raises `InvalidRequest`
    for a contradiction."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' goes on with the last message: leave "
            "'add_generation_prompt' out",
            param="continue_final_message",
        )
    return False


def chat_options(body: ChatRequest, caller: Caller) -> Options:
    """What a chat asks for. Raises `InvalidRequest` for fields that contradict each other."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("'top_logprobs' is allowed only with logprobs=true", param="logprobs")
    if body.max_tokens == 0:
        raise InvalidRequest("'max_tokens' must be at least 1", param="max_tokens")
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            "'max_tokens' and 'max_completion_tokens' differ; send one of them",
            param="max_completion_tokens",
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    options = _options(body, caller, max_tokens=next(iter(limits), None), logprobs=logprobs)
    return replace(
        options,
        add_generation_prompt=asks(body),
        continue_final_message=bool(body.continue_final_message),
        calling=calling_of(body.tools, body.tool_choice, body.parallel_tool_calls),
    )


def completion_options(body: CompletionRequest, caller: Caller) -> Options:
    """What a completion asks for. Raises `InvalidRequest` for contradicting fields."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            "'best_of' must equal 'n': picking the best of more choices is not supported",
            param="best_of",
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens=0 makes sense only with echo=true", param="max_tokens")
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _options(
        body, caller, max_tokens=max_tokens, logprobs=body.logprobs, echo=bool(body.echo)
    )


def _options(
    body: SamplingFields,
    caller: Caller,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
) -> Options:
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({min_tokens}) exceeds max_tokens ({max_tokens})", param="min_tokens"
        )
    sampling = SamplingParams(
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=body.logit_bias or {},
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=min_tokens,
        grammar=grammar_of(
            body.response_format, body.structured_outputs, ignore_eos=bool(body.ignore_eos)
        ),
        logprobs=logprobs,
    )
    return Options(
        model=body.model,
        sampling=sampling,
        max_tokens=max_tokens,
        seed=body.seed,
        n=body.n or 1,
        stops=tuple(body.stop or ()),
        echo=echo,
        priority=body.priority or 0,
        ttft_slo=body.ttft_slo or caller.ttft_slo,
        tpot_slo=body.tpot_slo or caller.tpot_slo,
        caller=caller,
        user=body.safety_identifier or body.user or "",
        receipt=body.store is not False,
        work_class=WorkClass.OFFLINE if body.service_tier == "flex" else WorkClass.ONLINE,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
