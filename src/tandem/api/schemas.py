"""What clients may send, field by field, in OpenAI's terms plus vLLM's extra sampling fields.

Types in bodies are strict (no number out of a string) and numbers finite. Knows no model: limits
that need one (vocabulary, context) are the services'. Invariant: a parsed body holds no field that
will be ignored without being listed in `fields.UNUSED`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from tandem.api.fields import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    UNUSED,
    Refused,
    check_extra,
)
from tandem.api.structured import ResponseFormat, StructuredOutputs
from tandem.api.tools import ToolChoice, Tools
from tandem.api.turns import Message, Messages
from tandem.core.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_METADATA = 16
SloSeconds = Annotated[float, Field(gt=0, le=3600.0)]
_SLO = TypeAdapter(SloSeconds)
PERSON = r"^[^\x00-\x1f\x7f]{0,256}$"  # a client's word for a person or a conversation
WORD = r"^[^\x00-\x1f\x7f]*$"  # no control characters: a database takes no null
MAX_INT = 2**31 - 1
# What is checked before pydantic sees it, as others read it.
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOPS = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {"anyOf": [{"type": "string"}, _IDS]}
_PROMPTS = {"anyOf": [*_PROMPT["anyOf"], {"type": "array", "items": _PROMPT, "minItems": 1}]}
_BIAS = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_LOGIT_BIAS,
}
# pydantic's kind of problem -> what is said of the value.
_LIMITS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} item(s), not {actual_length}",
    "too_long": "must have at most {max_length} items, not {actual_length}",
}


def stop_list(value: object) -> object:
    """Stop strings: one or a list."""
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has {len(stops)} entries; at most {MAX_STOPS} are allowed")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"every entry must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _logit_bias(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("must be an object that maps token ids to numbers")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    bias: dict[int, float] = {}
    for token, number in value.items():
        if not (str(token).isascii() and str(token).isdigit()) or len(str(token)) > 9:
            raise ValueError(f"key {str(token)[:50]!r} is not a token id")
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise ValueError(f"the bias of token {token} must be a number")
        if not -100 <= number <= 100:
            raise ValueError(f"the bias of token {token} must be between -100 and 100")
        bias[int(token)] = float(number)
    return bias


def _prompts(value: object) -> object:
    """One prompt or several, each a string or a list of token ids."""
    if isinstance(value, str) or _is_ids(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, or one or several lists of ids")
    if not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in value):
        raise ValueError("every prompt must be a string or a non-empty list of token ids")
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in value]


def _few(value: object) -> object:
    """Every wrong entry of an object would be told; so many there may not be."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"has {len(value)} entries; at most {MAX_METADATA} are allowed")
    return value


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    BeforeValidator(_few),
]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


class Body(BaseModel):
    """A JSON object that a route takes; unknown fields are found by `parse`.

    `refused` are known fields that have no effect here, `unused` those that need none.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    refused: ClassVar[Mapping[str, Refused]] = {}
    unused: ClassVar[Mapping[str, str]] = UNUSED


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


# One wrong item is enough to refuse a list: the others are not looked at.
StopTokens = Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKENS)]


class SamplingFields(Body):
    """Fields that chats and completions share; None means OpenAI's default."""

    model: str
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[int, float], BeforeValidator(_logit_bias), WithJsonSchema(_BIAS)] | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    stop: Annotated[list[str], BeforeValidator(stop_list), WithJsonSchema(STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    stop_token_ids: StopTokens | None = None
    priority: Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)] | None = None
    ttft_slo: SloSeconds | None = None
    tpot_slo: SloSeconds | None = None
    user: Annotated[str, Field(pattern=PERSON)] | None = None
    safety_identifier: Annotated[str, Field(pattern=PERSON)] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class ChatRequest(SamplingFields):
    """Body of /v1/chat/completions."""

    refused = CHAT_REFUSED
    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingFields):
    """Body of /v1/completions."""

    refused = COMPLETION_REFUSED
    prompt: Annotated[
        list[str | tuple[int, ...]], PlainValidator(_prompts), WithJsonSchema(_PROMPTS)
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None


class TokenizeRequest(Body):
    """Body of /tokenize: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None


class DetokenizeRequest(Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class LoadAdapterRequest(Body):
    """Body of /v1/adapters/{name}/load; without `path` the name is looked up."""

    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None


Parsed = TypeVar("Parsed", bound=Body)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """A checked body. Raises `InvalidRequest` that names the first offending field."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    check_extra(parsed.model_extra or {}, kind.refused, unused=kind.unused)
    for path in _not_finite(parsed):
        raise InvalidRequest(f"'{path}': must be a finite number", param=path)
    for name, value in parsed:
        for place, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, Message):
                item.check(f"{name}[{place}].")
    return parsed


def _not_finite(parsed: Body) -> Iterator[str]:
    """Where numbers that are none stand in what has no type of its own; JSON has none of them."""
    pending: list[tuple[str, Any]] = [("", parsed)]
    while pending:
        path, value = pending.pop()
        form = "{}[{}]" if isinstance(value, list) else "{}.{}"
        for name, inner in _items(value):  # there may be millions: only few are named
            if isinstance(inner, BaseModel | dict | list):
                pending.append((form.format(path, name)[:200], inner))
            elif isinstance(inner, float) and not math.isfinite(inner):
                yield form.format(path, name)[:200].removeprefix(".")


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, BaseModel):
        return _fields(value)
    return value.items() if isinstance(value, dict) else enumerate(value)


def _fields(model: BaseModel) -> Iterator[tuple[str, Any]]:
    """Names as the client writes them, and values."""
    known = type(model).model_fields
    for name, value in model:
        yield (known[name].alias or name if name in known else name), value


def slo_of_header(name: str, text: str) -> float:
    """Seconds of an objective that came as a header. Raises `InvalidRequest` that names it."""
    try:
        return _SLO.validate_strings(text)
    except ValidationError as error:
        raise InvalidRequest(f"header '{name}': {_says(error.errors()[0])}", param=name) from None


def _refusal(error: ValidationError) -> InvalidRequest:
    first: Any = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    path = _path(first["loc"])
    if not path:
        return InvalidRequest("the body must be a JSON object", code="invalid_type")
    if first["type"] == "missing":
        return InvalidRequest(f"missing required parameter: '{path}'", param=path)
    return InvalidRequest(f"'{path}': {_says(first)}", param=path)


def _says(problem: Any) -> str:
    """What is wrong with a value."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind in _LIMITS:
        return _LIMITS[kind].format(**{name: _plain(value) for name, value in context.items()})
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


def _plain(value: object) -> str:
    """A value of pydantic's context: a number without a needless ".0", anything else as it is."""
    return f"{value:.15g}" if isinstance(value, int | float) else str(value)


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
