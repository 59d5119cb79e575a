"""From what a client may ask an answer to match, to a grammar: schema, expression, choice, grammar.

Bounds what is handed on, so that no grammar takes long to compile or to follow. Whether a grammar
is right is known only where it is compiled. Knows no HTTP. Invariant: an error names the field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from tandem.core.errors import InvalidRequest
from tandem.core.sampling import Grammar, GrammarKind
from tandem.services.answering.closing import closed
from tandem.services.answering.strict import check_strict

MOST_SCHEMA_BYTES = 64 << 10
MOST_GRAMMAR_CHARS = 16 << 10
MOST_REGEX_CHARS = 4096
MOST_CHOICES = 1000
_MOST_LEVELS = 64
_MOST_PROPERTIES = 1000  # of one object
_MOST_TEXT_CHARS = 4096  # of one name, value or pattern
_MOST_MULTIPLE = 10_000  # smallest number that fits all `multipleOf`, without its decimal point
_TOLD_ONLY = frozenset({"description", "title", "$comment", "examples", "default"})
ANY_OBJECT = {"type": "object"}
Path = tuple[str | int, ...]


def of_schema(schema: Any, param: str, *, strict: bool = False) -> Grammar:
    """JSON that a schema allows, without properties that it does not speak of; with `strict` the
    schema is of OpenAI's subset. Raises `InvalidRequest`."""
    check_schema(schema, param, strict=strict)
    text = json.dumps(closed(schema), separators=(",", ":"))
    return Grammar(GrammarKind.JSON, text, param)


def check_schema(schema: Any, param: str, *, strict: bool = False) -> int:
    """The bytes of a schema that is within the bounds. Raises `InvalidRequest`."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"'{param}' must be a JSON schema, which is an object", param=param)
    multiple = 1
    for path, key, value in _walk(schema, param):
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(param, path, "must be a finite number")
        if isinstance(value, str) and len(value) > _MOST_TEXT_CHARS:
            raise _wrong(param, path, f"has more than {_MOST_TEXT_CHARS} characters")
        if key == "properties" and isinstance(value, dict) and len(value) > _MOST_PROPERTIES:
            raise _wrong(param, path, f"has more than {_MOST_PROPERTIES} properties")
        if key == "multipleOf" and isinstance(value, int | float) and not isinstance(value, bool):
            multiple = math.lcm(multiple, _digits(value))
            if multiple > _MOST_MULTIPLE:
                raise _wrong(param, path, "and others before it have too many digits together")
    size = len(json.dumps(schema, separators=(",", ":")))
    if size > MOST_SCHEMA_BYTES:
        raise _large(param, size)
    if strict:
        check_strict(schema, param)
    return size


def of_regex(text: str, param: str) -> Grammar:
    """Text that a regular expression matches as a whole. Raises `InvalidRequest`."""
    return Grammar(GrammarKind.REGEX, _short(text, MOST_REGEX_CHARS, param), param)


def of_grammar(text: str, param: str) -> Grammar:
    """Text that a grammar derives, in Lark's notation or llama.cpp's. Raises `InvalidRequest`."""
    if "%json" in text:
        raise InvalidRequest(
            f"'{param}': '%json' is not supported here; use 'structured_outputs.json'", param=param
        )
    kind = GrammarKind.GBNF if "::=" in text else GrammarKind.LARK
    return Grammar(kind, _short(text, MOST_GRAMMAR_CHARS, param), param)


def of_choice(choices: Sequence[str], param: str) -> Grammar:
    """One of some texts. Raises `InvalidRequest`."""
    if not 1 <= len(choices) <= MOST_CHOICES:
        raise InvalidRequest(f"'{param}' must have 1 to {MOST_CHOICES} entries", param=param)
    for choice in choices:
        _short(choice, _MOST_TEXT_CHARS, param)
    text = "start: " + " | ".join(map(json.dumps, dict.fromkeys(choices)))
    return Grammar(GrammarKind.LARK, _short(text, MOST_SCHEMA_BYTES, param), param)


def _short(text: str, most: int, param: str) -> str:
    if not text:
        raise InvalidRequest(f"'{param}' must not be empty", param=param)
    if len(text) > most:
        raise InvalidRequest(
            f"'{param}' has {len(text)} characters; at most {most} are allowed", param=param
        )
    return text


def _walk(schema: Mapping[str, Any], param: str) -> Iterator[tuple[Path, str, Any]]:
    """Every value below `schema` with its path and the last name in that; names are values too.

    Raises `InvalidRequest` where it is nested too deeply, or has too many.
    """
    pending: list[tuple[Path, str, Any]] = [((), "", schema)]
    values = 0
    while pending:
        path, key, value = pending.pop()
        values += len(value) if isinstance(value, Mapping | list) else 0
        if values > MOST_SCHEMA_BYTES:  # each has a byte at least
            raise _large(param, values)
        if len(path) > _MOST_LEVELS:
            raise InvalidRequest(
                f"'{param}' is nested more than {_MOST_LEVELS} levels deep", param=param
            )
        yield path, key, value
        if isinstance(value, Mapping):
            for name, inner in value.items():
                yield path, "", name
                if not (name in _TOLD_ONLY and isinstance(inner, str)):
                    pending.append(((*path, name), name, inner))
        elif isinstance(value, list):
            pending += [((*path, place), "", inner) for place, inner in enumerate(value)]


def _large(param: str, size: int) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}' has {size} bytes or more; at most {MOST_SCHEMA_BYTES} are allowed", param=param
    )


def _digits(number: int | float) -> int:
    """A number without its decimal point, and without zeros at its end if it has one."""
    if not number:
        return 1
    parts = Decimal(repr(number)).normalize().as_tuple()
    digits = int("".join(map(str, parts.digits)))
    return digits * int(10 ** max(int(parts.exponent), 0))


def _wrong(param: str, path: Path, problem: str) -> InvalidRequest:
    where = ".".join(map(str, path))[-200:]
    return InvalidRequest(f"'{param}': {where} {problem}", param=param)
