"""Forced tool calls with the real engine and the bundled demo model, which knows no tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from engine_serving import live_engine
from tandem.config import resolve

SIZE = {"type": "string", "enum": ["small", "large"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "order",
        "parameters": {
            "type": "object",
            "properties": {"size": SIZE, "number": {"type": "integer", "enum": [1, 2]}},
            "required": ["size", "number"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    settings = resolve(
        {
            "model": {"model": "demo", "dtype": "float32", "threads": 1},
            "cache": {"memory_bytes": 64 << 20},
        }
    )
    with (
        live_engine(settings) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "order"}}]
)
def test_a_forced_call_has_the_arguments_of_its_schema(client: openai.OpenAI, choice: Any) -> None:
    asks: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Two, please."}],
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 1,
    }
    whole = client.chat.completions.create(**asks).choices[0]
    with client.chat.completions.stream(**asks) as stream:
        final = stream.get_final_completion().choices[0]
    for answer in (whole, final):
        assert answer.finish_reason == "tool_calls" and not answer.message.content
        [call] = answer.message.tool_calls or []
        assert call.type == "function" and call.function.name == "order"
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == {"size", "number"}
        assert arguments["size"] in SIZE["enum"] and arguments["number"] in (1, 2)


def test_a_tool_whose_schema_cannot_be_is_refused(client: openai.OpenAI) -> None:
    wrong = {**TOOL["function"], "parameters": {"type": "object", "properties": {"a": {"type": 5}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hi"}],
            tools=[{"type": "function", "function": wrong}],  # type: ignore[typeddict-item]
            tool_choice="required",
        )
    assert str(refused.value.param).startswith("tools")
