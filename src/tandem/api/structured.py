"""`response_format` and `structured_outputs`: what an answer must match, as clients say it.

OpenAI's words and vLLM's. Turns them into one grammar. Invariant: a field that says nothing here is
refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from tandem.core.errors import InvalidRequest
from tandem.core.sampling import ENDLESS, Grammar
from tandem.services.answering.grammars import (
    ANY_OBJECT,
    MOST_CHOICES,
    MOST_SCHEMA_BYTES,
    of_choice,
    of_grammar,
    of_regex,
    of_schema,
)

_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class JsonSchema(_Fields):
    """OpenAI's named schema; `description` is for people."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Fields):
    """OpenAI's word for it: any text, any JSON object, or what a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Choice = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_CHOICES)]


class StructuredOutputs(_Fields):
    """vLLM's word for it: exactly one of these. `json` is a schema, or the text of one."""

    json_: Annotated[Any, Field(alias="json"), WithJsonSchema(_SCHEMA)] = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    json_object: bool | None = None


def grammar_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    *,
    ignore_eos: bool,
) -> Grammar | None:
    """What the answer must match; None: anything. Raises `InvalidRequest`."""
    grammar = None if response_format is None else _formatted(response_format)
    if structured is not None:
        if grammar is not None:
            raise InvalidRequest(
                "send either 'response_format' or 'structured_outputs'", param="structured_outputs"
            )
        grammar = _structured(structured)
    if grammar is not None and ignore_eos:
        raise InvalidRequest(ENDLESS, param="ignore_eos")
    return grammar


def _formatted(wanted: ResponseFormat) -> Grammar | None:
    named, param = wanted.json_schema, "response_format.json_schema"
    if named is None and wanted.type == "json_schema":
        raise InvalidRequest(f"missing required parameter: '{param}'", param=param)
    if named is not None:
        if wanted.type != "json_schema":
            raise InvalidRequest(f"'{param}' goes with the type 'json_schema' only", param=param)
        return of_schema(named.json_schema, f"{param}.schema", strict=bool(named.strict))
    return of_schema(ANY_OBJECT, "response_format") if wanted.type == "json_object" else None


def _structured(fields: StructuredOutputs) -> Grammar:
    given = [name for name, value in fields if value is not None and value is not False]
    if len(given) != 1:
        raise InvalidRequest(
            "'structured_outputs' takes exactly one of 'json', 'regex', 'choice', 'grammar' and "
            f"'json_object', not {len(given)}",
            param="structured_outputs",
        )
    param = f"structured_outputs.{given[0].rstrip('_')}"
    if fields.json_ is not None:
        return of_schema(_parsed(fields.json_, param), param)
    if fields.regex is not None:
        return of_regex(fields.regex, param)
    if fields.choice is not None:
        return of_choice(fields.choice, param)
    if fields.grammar is not None:
        return of_grammar(fields.grammar, param)
    return of_schema(ANY_OBJECT, param)


def _parsed(schema: Any, param: str) -> Any:
    if not isinstance(schema, str):
        return schema
    if len(schema) > MOST_SCHEMA_BYTES:
        raise InvalidRequest(
            f"'{param}' has {len(schema)} bytes; at most {MOST_SCHEMA_BYTES} are allowed",
            param=param,
        )
    try:
        return msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' is not valid JSON: {error}", param=param) from None
