"""What an answer may be asked to match is bounded before it is handed on."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tandem.core.errors import InvalidRequest
from tandem.core.sampling import Grammar, GrammarKind
from tandem.services.answering.grammars import (
    MOST_CHOICES,
    MOST_GRAMMAR_CHARS,
    MOST_REGEX_CHARS,
    MOST_SCHEMA_BYTES,
    check_schema,
    of_choice,
    of_grammar,
    of_regex,
    of_schema,
)

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z]", "description": "x" * 5000},
        "age": {"type": ["integer", "null"], "minimum": 0},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 3},
    },
    "required": ["name", "age", "parts"],
    "additionalProperties": False,
    "$defs": {
        "part": {
            "anyOf": [
                {"enum": ["a", "b"]},
                {
                    "type": "object",
                    "properties": {"next": {"$ref": "#"}},
                    "required": ["next"],
                    "additionalProperties": False,
                },
            ]
        }
    },
}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {
            "type": "object",
            "properties": {"a": schema},
            "required": ["a"],
            "additionalProperties": False,
        }
    return schema


def refusal(schema: Any, *, strict: bool = False) -> str:
    with pytest.raises(InvalidRequest) as refused:
        check_schema(schema, "field", strict=strict)
    assert refused.value.param == "field" and "'field'" in str(refused.value)
    return str(refused.value)


def test_a_schema_goes_on_as_its_text_in_its_order() -> None:
    for strict in (False, True):
        grammar = of_schema(PERSON, "field", strict=strict)
        assert grammar.kind is GrammarKind.JSON and grammar.param == "field"
        assert json.loads(grammar.text) == PERSON
        assert list(json.loads(grammar.text)["properties"]) == ["name", "age", "parts"]


@pytest.mark.parametrize("schema", [[], "x", True, None, 5])
def test_a_schema_is_an_object(schema: Any) -> None:
    assert "must be a JSON schema" in refusal(schema)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (nested(40), "64 levels"),
        (nested(3000), "64 levels"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "1000 properties"),
        ({"enum": [0] * 5_000_000}, str(MOST_SCHEMA_BYTES)),
        ({"enum": [f"value {i}" for i in range(6000)]}, str(MOST_SCHEMA_BYTES)),
        ({"enum": ["x" * 4097]}, "enum.0 has more than 4096"),
        ({"properties": {"x" * 4097: {}}}, "4096"),
        ({"const": {"deep": ["x" * 4097]}}, "4096"),
        ({"minimum": math.nan}, "minimum must be a finite"),
        ({"items": {"maximum": -math.inf}}, "items.maximum must be a finite"),
        ({"multipleOf": 10_007}, "multipleOf"),
        ({"allOf": [{"multipleOf": 101}, {"multipleOf": 1.03}]}, "multipleOf"),
        ({"multipleOf": 1e300}, "multipleOf"),
    ],
)
def test_large_schemas_are_refused_with_the_reason(schema: Any, says: str) -> None:
    assert says in refusal(schema)


@pytest.mark.parametrize("number", [1, 100, 0.01, 0.25, 10_000, 1e-9, 0, -3, 2500.0, True])
def test_usual_multiples_are_allowed(number: float) -> None:
    check_schema({"type": "number", "multipleOf": number}, "field")


def test_what_is_told_to_people_may_be_long() -> None:
    check_schema({"type": "string", "description": "x" * 10_000, "title": "y" * 5000}, "field")


OUTSIDE = (
    "not", "if", "then", "else", "oneOf", "dependentRequired", "uniqueItems", "minLength",
    "propertyNames", "contains",
)  # fmt: skip


def changed(**change: Any) -> dict[str, Any]:
    return {**PERSON, **change}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (changed(type="array"), "'type'"),
        (changed(anyOf=[]), "'anyOf'"),
        ({}, "'type'"),
        (changed(additionalProperties=True), "'additionalProperties' must be false"),
        (changed(required=["name"]), "'required' must list every property; it lacks 'age'"),
        (changed(required=None), "'required' has the wrong type"),
        (changed(properties=[]), "'properties' has the wrong type"),
        (changed(properties={"a": 5}, required=["a"]), "must be a schema"),
        (changed(allOf=[{}]), "'allOf' is not supported"),
        (changed(patternProperties={}), "'patternProperties' is not supported"),
        *(
            (changed(**{"$defs": {"part": {keyword: {}}}}), f"{keyword!r} is not supported")
            for keyword in OUTSIDE
        ),
        (changed(**{"$defs": {"part": {"format": "uri"}}}), "'format' 'uri'"),
        (changed(**{"$defs": {"part": {"format": []}}}), "'format' '[]'"),
        (changed(**{"$defs": {"part": {"type": "object"}}}), "'additionalProperties'"),
        (changed(**{"$defs": {"part": {"items": {"anyOf": [{"not": {}}]}}}}), "'not'"),
        (changed(**{"$defs": {"part": {"enum": list(range(1001))}}}), "'enum'"),
        (nested(11), "10 levels"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_strict_refuses_by_the_keyword(schema: Any, says: str) -> None:
    assert says in refusal(schema, strict=True) and "strict" in refusal(schema, strict=True)


def test_strict_says_where() -> None:
    wrong = changed(**{"$defs": {"part": {"anyOf": [{"type": "string"}, {"not": {}}]}}})
    assert "at $defs.part.anyOf.1" in refusal(wrong, strict=True)


def test_expressions_choices_and_grammars() -> None:
    assert of_regex("a+", "r") == Grammar(GrammarKind.REGEX, "a+")
    assert of_grammar('start: "a"', "g").kind is GrammarKind.LARK
    assert of_grammar('root ::= "a"', "g").kind is GrammarKind.GBNF
    assert of_choice(['a "b"', "c", "c"], "c").text == 'start: "a \\"b\\"" | "c"'


def test_expressions_choices_and_grammars_have_bounds() -> None:
    for make in (
        lambda: of_regex("", "p"),
        lambda: of_regex("a" * (MOST_REGEX_CHARS + 1), "p"),
        lambda: of_grammar("a" * (MOST_GRAMMAR_CHARS + 1), "p"),
        lambda: of_grammar("start: %json {}", "p"),
        lambda: of_choice([], "p"),
        lambda: of_choice(["a", ""], "p"),
        lambda: of_choice([str(i) for i in range(MOST_CHOICES + 1)], "p"),
        lambda: of_choice(["x" * 4000] * 2 + [f"{i}" + "x" * 4000 for i in range(20)], "p"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            make()
        assert refused.value.param == "p"
