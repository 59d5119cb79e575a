"""Objects get no properties but those that a schema names, and nothing else changes."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.services.answering.closing import closed

NAME = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
CLOSED = {**NAME, "additionalProperties": False}


def with_age(schema: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"age": {"type": "integer"}, "of": schema}, "additionalProperties": True}


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (NAME, CLOSED),
        ({"type": "array", "items": NAME}, {"type": "array", "items": CLOSED}),
        ({"prefixItems": [NAME, {}]}, {"prefixItems": [CLOSED, {}]}),
        ({"anyOf": [NAME, {"type": "null"}], "title": "x"},
         {"anyOf": [CLOSED, {"type": "null"}], "title": "x"}),
        ({"additionalProperties": NAME}, {"additionalProperties": CLOSED}),
        ({"$ref": "#/$defs/a", "$defs": {"a": NAME}},
         {"$ref": "#/$defs/a", "$defs": {"a": CLOSED}}),
        (with_age(NAME), with_age(CLOSED)),
        ({"const": NAME}, {"const": NAME}),
    ],
)  # fmt: skip
def test_objects_with_properties_allow_no_others(schema: Any, wanted: Any) -> None:
    assert closed(schema) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**NAME, "additionalProperties": True},
        {**NAME, "additionalProperties": {"type": "integer"}},
        {**NAME, "patternProperties": {"^x": {}}},
        {**NAME, "minProperties": 3},
        {"properties": {"a": {}}, "required": ["b"]},
        {"allOf": [NAME, {"properties": {"age": {}}}]},
        {"oneOf": [NAME, {"properties": {"age": {}}, "required": ["age"]}]},
        {"properties": {"a": {}}, "anyOf": [NAME, {"properties": {"b": {}}}]},
        {"$ref": "#/$defs/a", "properties": {"b": {}}, "$defs": {"a": NAME}},
        {"properties": {"a": {"$ref": "#/parts/b"}}, "parts": {"b": {"allOf": [NAME]}}},
        {"properties": 5},
        {"properties": {"a": {}}, "required": [[]]},
        {"properties": {"kind": {}}, "enum": [{"kind": "a", "n": 1}]},
        {"$ref": "#/$defs/a", "minProperties": 2, "$defs": {"a": {"properties": {"x": {}}}}},
        {"anyOf": [{"properties": {"x": {}}}, {"properties": {"y": {}}}], "minProperties": 2},
        {"properties": {"a": {}}, "required": [[]], "items": 5, "anyOf": 5, "$defs": 5},
    ],
)
def test_what_speaks_of_others_or_combines_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema


SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "integer"}, {"type": "null"}]),
    lambda inner: (
        st.fixed_dictionaries(
            {"properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3)},
            optional={
                "required": st.lists(st.sampled_from("abcd"), max_size=2, unique=True),
                "additionalProperties": st.booleans() | inner,
                "minProperties": st.integers(0, 4),
                "anyOf": st.lists(inner, min_size=1, max_size=2),
                "allOf": st.lists(inner, min_size=1, max_size=2),
                "oneOf": st.lists(inner, min_size=1, max_size=2),
            },
        )
        | st.fixed_dictionaries({"items": inner})
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)})
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.none() | st.integers(0, 3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abcd"), inner),
    max_leaves=5,
)


@given(SCHEMAS, VALUES)
def test_what_the_closed_schema_allows_the_given_one_allows(schema: Any, value: Any) -> None:
    if jsonschema.Draft202012Validator(closed(schema)).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)
