"""Objects of a JSON schema get no properties but those that it names, unless it speaks of others.

JSON Schema allows others by default, and a model that may write them often does not stop: clients
make their schemas from classes, and drop what these do not have. Knows no grammar. Invariant: what
the closed schema allows, the given one allows, and it allows something if the given one does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keywords below which are schemas: one, a list of them, or some by name.
_ONE = ("items", "additionalProperties")
_LISTS = ("prefixItems", "anyOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
# An object that has one of these says by itself which other properties it may have, or must have.
_SPEAKS = frozenset(
    {
        "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
        "minProperties", "dependentRequired", "dependencies", "const", "enum",
    }
)  # fmt: skip
# Schemas that are combined by these may each name a part of the properties.
_COMBINES = frozenset(
    {"allOf", "oneOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
)
# Of these, only "properties" and "required" may stand together.
_BESIDE = frozenset({"$ref", "anyOf", "properties", "required"})
# Another schema for the same value: what stands beside may need properties that it does not name.
_ELSEWHERE = frozenset({"$ref", "anyOf"})


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema`, in which objects with `properties` allow no others. A schema that combines schemas
    stays as it is, since it may name the properties of one object in several places."""
    if any(_combines(part) for part in _parts(schema)):
        return dict(schema)
    made: dict[str, Any] = _closed(schema)
    return made


def _combines(part: Mapping[str, Any]) -> bool:
    beside = _BESIDE & part.keys()
    mixed = len(beside) > 1 and beside != {"properties", "required"}
    mixed = mixed or bool(_ELSEWHERE & part.keys() and _SPEAKS & part.keys())
    return mixed or bool(_COMBINES & part.keys())


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All objects in the schema: a reference may lead to any."""
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            yield part
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _ONE:
            made[key] = _closed(value)
        elif key in _LISTS and isinstance(value, list):
            made[key] = [_closed(part) for part in value]
        elif key in _NAMED and isinstance(value, Mapping):
            made[key] = {name: _closed(part) for name, part in value.items()}
        else:
            made[key] = value
    properties, required = schema.get("properties"), schema.get("required", [])
    names = properties if isinstance(properties, Mapping) else {}
    needs = required if isinstance(required, list) else []
    known = all(isinstance(name, str) and name in names for name in needs)
    if names and known and not _SPEAKS & schema.keys():
        made["additionalProperties"] = False
    return made
