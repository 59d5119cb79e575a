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


_NO_TOOLS = "tools are not supported; describe the tool in the prompt and parse the answer"
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
    "tools": Refused(([],), _NO_TOOLS),
    "tool_choice": Refused(("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": Refused((True, False), _NO_TOOLS),
    "functions": Refused(([],), _NO_TOOLS),
    "function_call": Refused(("none", "auto"), _NO_TOOLS),
    "modalities": Refused((["text"],), _TEXT_ONLY),
    "audio": Refused((), _TEXT_ONLY),
    "prediction": Refused((), "predicted outputs are not supported"),
    "reasoning_effort": Refused(("none",), "reasoning control is not supported"),
    "verbosity": Refused(("medium",), "ask for a shorter or longer answer in the prompt"),
    "web_search_options": Refused((), "web search is not supported"),
    **_SAMPLED,
}

COMPLETION_REFUSED = {
    "suffix": Refused(("",), "insertion is not supported"),
    **_SAMPLED,
}

MESSAGE_REFUSED = {
    "tool_calls": Refused(([],), _NO_TOOLS),
    "tool_call_id": Refused((), _NO_TOOLS),
    "function_call": Refused((), _NO_TOOLS),
    "audio": Refused((), _TEXT_ONLY),
    "refusal": Refused((), "send a refusal as the message's content"),
    "annotations": Refused(([],), _TEXT_ONLY),
}

NOT_SERVED = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/messages": "use /v1/chat/completions",
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


def check_extra(extra: Mapping[str, Any], refused: Mapping[str, Refused], where: str = "") -> None:
    """Raise `InvalidRequest` for the first field that is unknown or not at its default.

    `where` is the path of the object that holds the fields, e.g. `messages[0].`.
    """
    for name, value in extra.items():
        if value is None or (not where and name in UNUSED):
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
