"""OpenAI's subset of JSON schema, which `strict` promises.

Every object lists all its properties as required and allows no others; an optional one is a union
with null. A keyword outside the subset is refused by name. Not every rule of OpenAI is checked:
levels are not counted through `$ref`, for example. Source: OpenAI's guide "Structured outputs",
supported schemas.
"""

from __future__ import annotations

from typing import Any

from tandem.core.errors import InvalidRequest

_KEYWORDS = frozenset(
    {
        "type", "enum", "const", "anyOf", "$ref", "$defs", "definitions", "properties", "required",
        "additionalProperties", "items", "minItems", "maxItems", "pattern", "format", "multipleOf",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "title", "description",
        "default", "examples", "$schema", "$id", "$comment",
    }
)  # fmt: skip
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"}
)
_MOST_LEVELS, _MOST_PROPERTIES, _MOST_ENUM = 10, 5000, 1000


def check_strict(schema: dict[str, Any], param: str) -> None:
    """Raise `InvalidRequest` that names a keyword that the subset does not have."""
    if schema.get("type") != "object" or "anyOf" in schema:
        raise _refusal(param, "", "'type' of the whole schema must be 'object', without 'anyOf'")
    properties = values = 0
    pending: list[tuple[str, Any, int]] = [("", schema, 0)]
    while pending:
        path, part, level = pending.pop()
        if not isinstance(part, dict):
            raise _refusal(param, path, "must be a schema, which is an object")
        _check_keywords(part, path, param)
        if _is_object(part):
            level += 1
            _check_object(part, path, param)
        properties += len(part.get("properties", ()))
        values += len(part.get("enum", ()))
        if level > _MOST_LEVELS:
            raise _refusal(param, path, f"objects are nested more than {_MOST_LEVELS} levels deep")
        pending += [(*inner, level) for inner in _parts(part, path)]
    if properties > _MOST_PROPERTIES:
        raise _refusal(param, "", f"'properties' have more than {_MOST_PROPERTIES} in all")
    if values > _MOST_ENUM:
        raise _refusal(param, "", f"'enum' has more than {_MOST_ENUM} values in all")


def _check_keywords(part: dict[str, Any], path: str, param: str) -> None:
    for keyword in part:
        if keyword not in _KEYWORDS:
            raise _refusal(param, path, f"{keyword[:50]!r} is not supported")
    shapes = {"properties": dict, "$defs": dict, "definitions": dict, "required": list,
              "enum": list, "anyOf": list}  # fmt: skip
    for keyword, shape in shapes.items():
        if keyword in part and not isinstance(part[keyword], shape):
            raise _refusal(param, path, f"{keyword!r} has the wrong type")
    form = part.get("format", "date")
    if not isinstance(form, str) or form not in _FORMATS:
        raise _refusal(param, path, f"'format' {str(part['format'])[:50]!r} is not supported")


def _is_object(part: dict[str, Any]) -> bool:
    kind = part.get("type")
    return kind == "object" or (isinstance(kind, list) and "object" in kind) or "properties" in part


def _check_object(part: dict[str, Any], path: str, param: str) -> None:
    if part.get("additionalProperties") is not False:
        raise _refusal(param, path, "'additionalProperties' must be false")
    required = set(map(str, part.get("required", ())))
    missing = [name for name in part.get("properties", {}) if name not in required]
    if missing:
        raise _refusal(param, path, f"'required' must list every property; it lacks {missing[0]!r}")


def _parts(part: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    """The schemas inside a schema."""
    found = [
        (f"{path}.{keyword}.{name}", inner)
        for keyword in ("properties", "$defs", "definitions")
        for name, inner in part.get(keyword, {}).items()
    ]
    found += [(f"{path}.anyOf.{place}", inner) for place, inner in enumerate(part.get("anyOf", ()))]
    return [*found, (f"{path}.items", part["items"])] if "items" in part else found


def _refusal(param: str, path: str, problem: str) -> InvalidRequest:
    where = f" at {path[1:][-200:]}" if path else ""
    return InvalidRequest(
        f"'{param}' with strict=true: {problem}{where}; leave 'strict' out, or change the schema",
        param=param,
    )
