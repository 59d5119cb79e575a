"""Which fields are accepted without effect, and which fields and routes are refused by name.

OpenAI's clients send many fields. A field that we do not implement is fine at its default and an
error otherwise, so that nobody believes it had an effect. Invariant: no field with a value is
dropped in silence; docs/api.md lists the tables of fields and a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Refused:
    """A known field, accepted only at a value in `defaults`; `advice` says what to do instead."""

    defaults: tuple[Any, ...]
    advice: str


_OLD_TOOLS = "send 'tools' and 'tool_calls', which OpenAI has put in its place"
_TEXT_ONLY = "only text in and text out is supported"

UNUSED = {
    "metadata": "labels for the caller's own use",
    "prompt_cache_key": "prompts are cached by content",
    "prompt_cache_retention": "prompts are cached while memory lasts",
}

_SAMPLED = {
    "skip_special_tokens": Refused((True,), "special tokens have no text here"),
    "spaces_between_special_tokens": Refused((True,), "special tokens have no text here"),
    "include_stop_str_in_output": Refused((False,), "the text ends before the stop string"),
    "use_beam_search": Refused((False,), "beam search is not supported; use 'n'"),
    "length_penalty": Refused((1,), "beam search is not supported; use 'n'"),
}

CHAT_REFUSED = {
    "functions": Refused(([],), _OLD_TOOLS),
    "function_call": Refused(("none", "auto"), _OLD_TOOLS),
    "modalities": Refused((["text"],), _TEXT_ONLY),
    "audio": Refused((), _TEXT_ONLY),
    "prediction": Refused((), "predicted outputs are not supported"),
    "reasoning_effort": Refused(("none",), "reasoning control is not supported"),
    "verbosity": Refused(("medium",), "ask for a shorter or longer answer in the prompt"),
    "web_search_options": Refused((), "web search is not supported"),
    **_SAMPLED,
}

MESSAGES_UNUSED = {
    "metadata": "labels for the caller's own use",
    "cache_control": "prompts are cached by content",
    "context_management": "a conversation is as long as it is sent",
    "diagnostics": "Anthropic's own",
    "inference_geo": "the answer is made here",
    "service_tier": "there is one",
    "speed": "there is one",
    "thinking": "the model reasons as its chat template has it",
    "user_profile_id": "Anthropic's own",
    "workspace_id": "Anthropic's own",
}
MESSAGES_REFUSED = {
    "container": Refused((), "nothing is run here"),
    "mcp_servers": Refused(([],), "send the tools themselves in 'tools'"),
}
"""Of /v1/messages."""

RESPONSES_UNUSED = {
    **UNUSED,
    "access_programs": "OpenAI's own",
    "client_metadata": "labels for the caller's own use",
    "context_management": "a conversation is as long as it is sent",
    "image": "there are none",
    "include": "all there is, is in the answer",
    "max_tool_calls": "tools are the client's",
    "prompt_cache_options": "prompts are cached by content",
    "reasoning": "the model reasons as its chat template has it",
    "stream_options": "there is nothing to choose",
    "truncation": "a conversation that is too long is refused",
}
RESPONSES_REFUSED = {
    "background": Refused((False,), "answers are not stored; wait for this one"),
    "conversation": Refused((), "send the whole conversation in 'input'"),
    "moderation": Refused((), "it serves a model that generates text"),
    "previous_response_id": Refused(
        (), "answers are not stored; send the whole conversation in 'input'"
    ),
    "prompt": Refused((), "send the text itself in 'instructions' or 'input'"),
    "top_logprobs": Refused((0,), "use /v1/chat/completions"),
}
"""Of /v1/responses."""

COMPLETION_REFUSED = {
    "suffix": Refused(("",), "insertion is not supported"),
    **_SAMPLED,
}

MESSAGE_REFUSED = {
    "function_call": Refused((), _OLD_TOOLS),
    "audio": Refused((), _TEXT_ONLY),
    "refusal": Refused((), "send a refusal as the message's content"),
    "annotations": Refused(([],), _TEXT_ONLY),
}

NOT_SERVED = {
    "/v1/responses": "answers are not stored; send the whole conversation to /v1/responses",
    "/v1/messages/batches": "use /v1/batches",
    "/v1/embeddings": "it serves a model that generates text",
    "/v1/rerank": "it serves a model that generates text",
    "/v1/score": "it serves a model that generates text",
    "/v1/moderations": "it serves a model that generates text",
    "/v1/uploads": "send the whole file to /v1/files",
    "/v1/audio": "only text in and text out is supported",
    "/v1/images": "only text in and text out is supported",
    "/v1/videos": "only text in and text out is supported",
    "/v1/realtime": "stream from /v1/chat/completions",
    "/v1/assistants": "use /v1/chat/completions",
    "/v1/threads": "use /v1/chat/completions",
    "/v1/conversations": "send the whole conversation to /v1/chat/completions",
    "/v1/vector_stores": "nothing is searched here",
    "/v1/containers": "nothing is run here",
    "/v1/evals": "the gate measures every version, see /v1/adapters",
    "/v1/organization": "API keys are set by the server's operator",
}
"""Routes of OpenAI's and Anthropic's that clients may ask for, and what to do instead."""


def check_extra(
    extra: Mapping[str, Any],
    refused: Mapping[str, Refused],
    where: str = "",
    unused: Mapping[str, str] = UNUSED,
) -> None:
    """Raise `InvalidRequest` for the first field that is unknown or not at its default, unless it
    is `unused`.

    `where` is the path of the object that holds the fields, e.g. `messages[0].`.
    """
    for name, value in extra.items():
        if value is None or (not where and name in unused):
            continue
        path = f"{where}{name}"
        if name not in refused:
            raise InvalidRequest(
                f"unrecognized request argument: '{path[:200]}'; remove it",
                param=path[:200],
                code="unknown_parameter",
            )
        if value not in refused[name].defaults:
            raise InvalidRequest(
                f"'{path}' is not supported: {refused[name].advice}",
                param=path,
                code="unsupported_parameter",
            )
