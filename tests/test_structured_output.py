"""Structured output of a real engine in its own process, through the official client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from engine_serving import live_engine
from tandem.config import ModelConfig, Settings

TURNS: list[Any] = [{"role": "user", "content": "Tell me about Anna."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Anna", "Bob"]},
        "code": {"type": "string", "pattern": "^[a-f]{8}$"},
    },
    "required": ["name", "code"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "it", "schema": SCHEMA, "strict": True},
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_engine(Settings(model=ModelConfig(model="demo"))) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"model": "demo", "messages": TURNS, "response_format": FORMAT, "max_tokens": 100}
    return client.chat.completions.create(**asked | fields)


def text(client: openai.OpenAI, structured: dict[str, Any], **fields: Any) -> Any:
    extra = {"structured_outputs": structured, **fields.pop("extra", {})}
    asked = {"model": "demo", "prompt": "Once", "max_tokens": 40, "extra_body": extra}
    return client.completions.create(**asked | fields)


def matches(said: str | None) -> None:
    jsonschema.validate(json.loads(said or ""), SCHEMA)


def test_every_choice_matches_whatever_else_is_asked(client: openai.OpenAI) -> None:
    asked: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"n": 3, "seed": 5, "temperature": 2.0},
        {"seed": 1, "top_p": 0.5, "extra_body": {"top_k": 3, "min_p": 0.1}},
        {"presence_penalty": 2, "frequency_penalty": 2, "extra_body": {"repetition_penalty": 10}},
        {"logit_bias": {str(token): -100 for token in range(2, 1000)}},
        {"extra_body": {"min_tokens": 90}},
        {"logprobs": True, "top_logprobs": 3, "n": 2},
    )
    for fields in asked:
        answer = chat(client, **fields)
        for choice in answer.choices:
            assert choice.finish_reason == "stop", fields
            matches(choice.message.content)
        if "logprobs" in fields:
            pieces = answer.choices[0].logprobs.content
            assert "".join(piece.token for piece in pieces) == answer.choices[0].message.content


def test_seeds_repeat_and_a_stream_says_the_same(client: openai.OpenAI) -> None:
    said = [chat(client, seed=seed).choices[0].message.content for seed in (1, 1, 2, 3, 4)]
    assert said[0] == said[1] and len(set(said)) > 1
    stream = chat(client, seed=1, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == said[0]
    assert chunks[-1].finish_reason == "stop"


def test_a_limit_or_a_stop_text_cuts_it(client: openai.OpenAI) -> None:
    whole = chat(client, temperature=0).choices[0].message.content
    short = chat(client, temperature=0, max_tokens=3).choices[0]
    assert short.finish_reason == "length" and whole.startswith(short.message.content)
    stopped = chat(client, temperature=0, stop="name").choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == whole.split("name")[0]


def test_expressions_choices_and_grammars(client: openai.OpenAI) -> None:
    expression = r"[a-d]{3}-[0-9]{2}"
    for choice in text(client, {"regex": expression}, n=4, seed=2).choices:
        assert re.fullmatch(expression, choice.text) and choice.finish_reason == "stop"
    odd = ['say "yes"', "né\n", "no/way"]
    assert text(client, {"choice": odd}, seed=3).choices[0].text in odd
    gbnf = 'root ::= "<" [xy]+ ">"'
    lark = 'start: "<" ("x" | "y")+ ">"'
    for grammar in (gbnf, lark):
        answer = text(client, {"grammar": grammar}, logit_bias={}, temperature=1.5, seed=1)
        assert re.match(r"<[xy]*>?$", answer.choices[0].text)


def test_any_object_and_any_value(client: openai.OpenAI) -> None:
    for structured in ({"json_object": True}, {"json": {"type": "array", "maxItems": 1}}):
        choice = text(client, structured, max_tokens=200, temperature=0).choices[0]
        assert choice.text[0] in "{["
        if choice.finish_reason == "stop":
            json.loads(choice.text)


def test_wrong_grammars_are_told_with_their_field(url: str) -> None:
    body = {"model": "demo", "messages": TURNS, "stream": True}
    schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"not": {}}}}
    for fields, param, says in (
        ({"response_format": schema}, "response_format.json_schema.schema", '"not"'),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs.grammar", "unknown"),
    ):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body | fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == param and says in error["message"]


def test_a_line_of_a_batch_matches(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "messages": TURNS, "response_format": FORMAT, "max_tokens": 100}
    bad = asked | {"response_format": {"type": "xml"}}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in (("good", asked), ("bad", bad))
    ]
    raw = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", raw), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    for _ in range(600):
        batch = client.batches.retrieve(batch.id)
        if batch.status == "completed":
            break
        time.sleep(0.1)
    assert batch.output_file_id is not None and batch.error_file_id is not None
    [good] = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    matches(good["response"]["body"]["choices"][0]["message"]["content"])
    [wrong] = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
    assert wrong["response"]["status_code"] == 400
