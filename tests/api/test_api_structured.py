"""`response_format` and `structured_outputs` over a scripted engine: what reaches it, what not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from fake_engine import FakeEngine, Script
from serving import demo_tokenizer, live, make_app
from tandem.core.errors import InvalidRequest
from tandem.core.request import Request
from tandem.core.sampling import TOO_COMPLEX, Grammar, GrammarKind
from tandem.core.sequence import FinishReason

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps({**SCHEMA, "additionalProperties": False}, separators=(",", ":"))
JSON = GrammarKind.JSON


def play(request: Request, index: int) -> Script:
    if "too complex" in str(request.sampling.grammar):
        return Script((), finish=FinishReason.ERROR, error=TOO_COMPLEX)
    return Script(demo_tokenizer().encode('{"a": 5}', add_special_tokens=False))


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(play=play)


@pytest.fixture(scope="module")
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    with live(make_app(engine)) as url, httpx.Client(base_url=url, timeout=30.0) as http:
        yield http


def named(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


GOOD: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, Grammar(JSON, '{"type":"object"}')),
    ({"response_format": named()}, Grammar(JSON, TEXT)),
    ({"response_format": named(strict=False, description="what")}, Grammar(JSON, TEXT)),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar(JSON, TEXT)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar(JSON, TEXT)),
    ({"structured_outputs": {"json_object": True}}, Grammar(JSON, '{"type":"object"}')),
    ({"structured_outputs": {"regex": "a|b"}}, Grammar(GrammarKind.REGEX, "a|b")),
    (
        {"structured_outputs": {"choice": ["a", "b"], "json_object": False}},
        Grammar(GrammarKind.LARK, 'start: "a" | "b"'),
    ),
    (
        {"response_format": {"type": "text"}, "structured_outputs": {"grammar": 'root ::= "a"'}},
        Grammar(GrammarKind.GBNF, 'root ::= "a"'),
    ),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fields", "grammar"), GOOD, ids=lambda value: str(value)[:40])
def test_what_is_asked_reaches_the_engine(
    http: httpx.Client, engine: FakeEngine, route: str, fields: Any, grammar: Grammar | None
) -> None:
    answer = http.post(route, json={"model": "demo", **ROUTES[route], **fields})
    assert answer.status_code == 200, answer.text
    assert engine.requests[-1].sampling.grammar == grammar


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {**named(), "type": "json_object"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "it"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": named([])}, "response_format.json_schema.schema"),
    ({"response_format": named(strict=True)}, "response_format.json_schema.schema"),
    ({"response_format": named(strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": named(name="a b")}, "response_format.json_schema.name"),
    ({"response_format": named(other=1)}, "response_format.json_schema.other"),
    (
        {"response_format": named({"minimum": float("nan")})},
        "response_format.json_schema.schema.minimum",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": named()}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"enum": ["x" * 5000]}}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"grammar": "start: %json {}"}}, "structured_outputs.grammar"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"guided_json": {}}, "guided_json"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_refused_by_its_name(
    http: httpx.Client, engine: FakeEngine, route: str, fields: Any, param: str
) -> None:
    before = len(engine.requests)
    body = json.dumps({"model": "demo", **ROUTES[route], **fields})
    answer = http.post(route, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert len(engine.requests) == before


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_the_requests_own_error(
    http: httpx.Client, engine: FakeEngine, stream: bool
) -> None:
    body = {"model": "demo", **ROUTES["/v1/completions"], "stream": stream}
    engine.refuse = InvalidRequest("'it' cannot be used", param="structured_outputs.regex")
    try:
        refused = http.post("/v1/completions", json=body | {"structured_outputs": {"regex": "("}})
    finally:
        engine.refuse = None
    failed = http.post(
        "/v1/completions", json=body | {"structured_outputs": {"regex": "too complex"}}
    )
    for answer in (refused, failed):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "structured_outputs.regex"
    assert failed.json()["error"]["message"] == TOO_COMPLEX


class Item(BaseModel):
    """As clients name a schema by a class."""

    a: int


def test_the_official_client_parses_its_class(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model="demo", messages=[{"role": "user", "content": "Hi"}], response_format=Item
        )
    assert answer.choices[0].message.parsed == Item(a=5)
