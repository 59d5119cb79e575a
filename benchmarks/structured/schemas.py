"""Schemas of the shapes that people publish, drawn at random, and grammars that nobody should.

The shapes are: flat records, nested and optional parts, enums, patterns and formats, unions with
null and of objects, tagged unions, arrays, maps, recursion. Invariant: the same seed and number
give the same schema.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]
_NAMES = (
    "id", "name", "title", "status", "city", "email", "price", "count", "tags", "items", "owner",
    "created", "note", "level", "unit", "address", "phone", "active", "score", "kind",
)  # fmt: skip
_WORDS = ("open", "closed", "red", "green", "small", "large", "north", "south", "urgent", "draft")
_PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^[a-z]+(-[a-z]+){0,2}$", "^#[0-9a-f]{6}$", "^v[0-9]\\.[0-9]$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")


def schema_of(number: int, seed: int = 0) -> Schema:
    """The schema of a number; the shapes take turns."""
    chosen = Random(seed * 1_000_003 + number)
    return _SHAPES[number % len(_SHAPES)](chosen)


def _leaf(chosen: Random) -> Schema:
    kind = chosen.randrange(9)
    low = chosen.randrange(100)
    leaves: tuple[Schema, ...] = (
        {"type": "string", "maxLength": chosen.choice((12, 24))},
        {"type": "integer", "minimum": low, "maximum": low + chosen.randrange(1, 500)},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1000},
        {"type": "boolean"},
        {"enum": chosen.sample(_WORDS, 3)},
        {"type": "string", "pattern": chosen.choice(_PATTERNS)},
        {"type": "string", "format": chosen.choice(_FORMATS)},
        {"type": ["string", "null"], "maxLength": 16},
        {"const": chosen.choice((*_WORDS, 7, True, None))},
    )
    return leaves[kind]


def _record(chosen: Random, parts: Callable[[Random], Schema], *, size: int = 3) -> Schema:
    """An object; some of its properties are optional, unless it is strict."""
    names = chosen.sample(_NAMES, size)
    strict = chosen.random() < 0.5
    return {
        "type": "object",
        "properties": {name: parts(chosen) for name in names},
        "required": names if strict else names[: max(1, size - 1)],
        "additionalProperties": False,
    }


def _flat(chosen: Random) -> Schema:
    return _record(chosen, _leaf, size=chosen.randrange(2, 6))


def _nested(chosen: Random) -> Schema:
    return _record(chosen, lambda inner: _record(inner, _flat if inner.random() < 0.3 else _leaf))


def _arrays(chosen: Random) -> Schema:
    def part(inner: Random) -> Schema:
        items = _leaf(inner) if inner.random() < 0.7 else _record(inner, _leaf, size=2)
        least = inner.randrange(3)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}

    return _record(chosen, part, size=2)


def _unions(chosen: Random) -> Schema:
    def part(inner: Random) -> Schema:
        return {"anyOf": [_leaf(inner), _record(inner, _leaf, size=2), {"type": "null"}]}

    return _record(chosen, part, size=2)


def _tagged(chosen: Random) -> Schema:
    """One of several objects, told apart by the value of one property."""
    kinds = [
        {
            "type": "object",
            "properties": {"kind": {"const": word}, "value": _leaf(chosen)},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for word in chosen.sample(_WORDS, 3)
    ]
    return {
        "type": "object",
        "properties": {"event": {"$ref": "#/$defs/event"}},
        "required": ["event"],
        "additionalProperties": False,
        "$defs": {"event": {"anyOf": kinds}},
    }


def _recursive(chosen: Random) -> Schema:
    """A tree or a linked list, whose depth the model chooses."""
    if chosen.random() < 0.5:
        inner: Schema = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    else:
        inner = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    node = {
        "type": "object",
        "properties": {"label": {"enum": chosen.sample(_WORDS, 4)}, "next": inner},
        "required": ["label", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _map(chosen: Random) -> Schema:
    """Names that the model chooses, with values of one kind."""
    name = chosen.choice(_NAMES)
    values = _leaf(chosen)
    inner = {"type": "object", "additionalProperties": values, "maxProperties": 3}
    return {
        "type": "object",
        "properties": {name: inner},
        "required": [name],
        "additionalProperties": False,
    }


_SHAPES = (_flat, _nested, _arrays, _unions, _tagged, _recursive, _map)


def _deep(levels: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _wide(count: int) -> Schema:
    return {"type": "object", "properties": {f"p{place}": {} for place in range(count)}}


def _tree(width: int, levels: int) -> Schema:
    if not levels:
        return {"type": "string"}
    return {"anyOf": [{"type": "object", "properties": {f"k{place}": _tree(width, levels - 1)}}
                      for place in range(width)]}  # fmt: skip


HOSTILE: dict[str, dict[str, Any]] = {
    "nested 60 deep": {"json": _deep(60)},
    "1,000 optional properties": {"json": _wide(1000)},
    "5,000 optional properties": {"json": _wide(5000)},
    "unions of 6^6": {"json": _tree(6, 6)},
    "a value of 100,000 characters": {"json": {"enum": ["x" * 100_000]}},
    "multiples of 1,000,003": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "two large multiples": {"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}},
    "itself": {"json": {"$ref": "#"}},
    "two that name each other": {
        "json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},
                                                "b": {"$ref": "#/$defs/a"}}}
    },
    "an address": {"json": {"$ref": "http://127.0.0.1:9/x"}},
    "optional letters and as many": {"regex": "(a?){500}a{500}"},
    "100,000 letters": {"regex": "x{100000}"},
    "no text": {"regex": "[^\\s\\S]"},
    "look-ahead": {"regex": "(?=a)b"},
    "2^60 letters": {
        "grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60))
        + '\na60: "x"\n'
    },
    "a rule without an end": {"grammar": 'start: a\na: "x" a\n'},
    "open brackets": {"grammar": "root ::= " + "(" * 16_000},
}  # fmt: skip
"""`structured_outputs` that must be refused."""
