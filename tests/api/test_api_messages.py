"""Anthropic's dialect with Anthropic's own client, over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest

from dialects import Says, events_of, prompt_of
from fake_engine import INFO, FakeEngine
from serving import live, make_app
from tandem.config import ServerConfig

MESSAGES = "/v1/messages"
CALLS = '<tool_call>[{"name": "Bash", "arguments": {"command": "ls"}}, ' \
    '{"name": "Bash", "arguments": {"command": "pwd"}}]</tool_call>'  # fmt: skip
BASH: dict[str, Any] = {
    "name": "Bash",
    "description": "Runs a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
ASKED: dict[str, Any] = {"role": "user", "content": "What is here?"}
GOOD: dict[str, Any] = {"model": "demo", "max_tokens": 500, "messages": [ASKED]}
# What Claude Code sends, by Anthropic's documentation of each field.
CODE: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=31f2c;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [{**BASH, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
    "tool_choice": {"type": "auto"},
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
    "stream": True,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>Hi</reminder>"},
                                     {"type": "text", "text": "What is here?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I look.", "signature": ""},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "call_1", "name": "Bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "call_2", "name": "Bash", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "call_1", "content": "a.txt"},
            {"type": "tool_result", "tool_use_id": "call_2", "is_error": True,
             "content": [{"type": "text", "text": "no command"}]},
            {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
        ]},
    ],
}  # fmt: skip
CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    "x-api-key": "sk-local",
    "x-app": "cli",
}


@pytest.fixture(scope="module")
def says() -> Says:
    return Says(CALLS)


@pytest.fixture(scope="module")
def engine(says: Says) -> FakeEngine:
    info = replace(INFO, max_model_len=4096, recording_tokens=8192)
    return FakeEngine(play=says, info=info, cached_tokens=4)


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with live(make_app(engine, ServerConfig(api_keys=("sk-local",)))) as url:
        yield url


@pytest.fixture
def client(url: str, says: Says) -> Iterator[anthropic.Anthropic]:
    says.text, says.dies_after = "Hello, how are you?", None
    with anthropic.Anthropic(base_url=url, api_key="sk-local", max_retries=0) as client:
        yield client


@pytest.fixture
def http(url: str, says: Says) -> Iterator[httpx.Client]:
    says.text, says.dies_after = "Hello, how are you?", None
    with httpx.Client(base_url=url, headers=CODE_HEADERS) as http:
        yield http


def test_a_message(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    answer = client.messages.create(**GOOD, system="Be brief.")
    assert answer.id.startswith("msg_") and answer.role == "assistant" and answer.model == "demo"
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == "Hello, how are you?"  # type: ignore[union-attr]
    assert answer.stop_reason == "end_turn" and answer.stop_sequence is None
    assert answer.usage.cache_read_input_tokens == 4
    assert answer.usage.input_tokens + 4 == len(engine.requests[-1].prompt)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt_of(engine)


def test_stops_and_limits(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(**GOOD, stop_sequences=[" how"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " how")
    assert answer.content[0].text == "Hello,"  # type: ignore[union-attr]
    answer = client.messages.create(**{**GOOD, "max_tokens": 2})
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 2


def test_a_message_calls_tools(client: anthropic.Anthropic, says: Says) -> None:
    says.text = f"I look.\n{CALLS}"
    answer = client.messages.create(**GOOD, tools=[BASH])  # type: ignore[list-item]
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert [b.input for b in answer.content if b.type == "tool_use"] == [
        {"command": "ls"},
        {"command": "pwd"},
    ]
    assert answer.stop_reason == "tool_use"
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    answer = client.messages.create(**GOOD, tools=[BASH], tool_choice=choice)  # type: ignore[list-item]
    assert [block.type for block in answer.content] == ["text", "tool_use"]


def test_a_stop_sequence_within_a_call_is_the_reason(
    client: anthropic.Anthropic, says: Says
) -> None:
    says.text = CALLS
    answer = client.messages.create(**GOOD, tools=[BASH], stop_sequences=["pwd"])  # type: ignore[list-item]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "pwd")
    assert [b.input for b in answer.content if b.type == "tool_use"] == [{"command": "ls"}, {}]


@pytest.mark.parametrize("text", ["Hello, how are you?", f"I look.\n{CALLS}", CALLS])
def test_a_stream_adds_up_to_the_whole_message(
    client: anthropic.Anthropic, says: Says, text: str
) -> None:
    says.text = text
    whole = client.messages.create(**GOOD, tools=[BASH])  # type: ignore[list-item]
    with client.messages.stream(**GOOD, tools=[BASH]) as stream:  # type: ignore[list-item]
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    told = [block.model_dump(exclude={"id", "parsed_output"}) for block in final.content]
    assert told == [block.model_dump(exclude={"id"}) for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def test_a_request_of_claude_code(http: httpx.Client, engine: FakeEngine, says: Says) -> None:
    says.text = f"I look.\n{CALLS}"
    answer = http.post(f"{MESSAGES}?beta=true", json=CODE)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    started = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in started] == [0, 1, 2]
    assert [event["content_block"]["type"] for event in started] == ["text", "tool_use", "tool_use"]
    is_open = False
    for event in events:
        is_open = {"content_block_start": True, "content_block_stop": False}.get(
            event["type"], is_open
        )
        assert is_open or event["type"] != "content_block_delta"
    pieces = [
        event["delta"]["partial_json"]
        for event in events
        if event["type"] == "content_block_delta" and event["index"] == 1
    ]
    assert len(pieces) > 2 and json.loads("".join(pieces)) == {"command": "ls"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    prompt = prompt_of(engine)
    assert "billing" not in prompt and "You are a coding agent.\n\n" in prompt
    assert '<tools>[{"name": "Bash"' in prompt
    assert "<reminder>Hi</reminder>\nWhat is here?" in prompt
    assert '{"name": "Bash", "arguments": {"command": "ls"}}' in prompt
    assert "<tool_response>\nno command\n</tool_response>\nGo on.<|im_end|>" in prompt
    assert engine.requests[-1].sampling.max_tokens == 4096 - len(engine.requests[-1].prompt)


def test_a_call_is_forced(client: anthropic.Anthropic, engine: FakeEngine, says: Says) -> None:
    says.text = CALLS
    for kind in ({"type": "any"}, {"type": "tool", "name": "Bash"}):
        choice: Any = kind
        client.messages.create(**GOOD, tools=[BASH], tool_choice=choice)  # type: ignore[list-item]
        grammar = engine.requests[-1].sampling.grammar
        assert grammar is not None and '\\"Bash\\"' in grammar.text


def test_text_must_match_a_format(http: httpx.Client, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    assert http.post(MESSAGES, json={**GOOD, "output_config": config}).status_code == 200
    grammar = engine.requests[-1].sampling.grammar
    closed = {**schema, "additionalProperties": False}
    assert grammar is not None and json.loads(grammar.text) == closed


def test_tokens_are_counted(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    client.messages.create(**GOOD, tools=[BASH], system="Brief.")  # type: ignore[list-item]
    counted = client.messages.count_tokens(
        model="demo",
        messages=[ASKED],  # type: ignore[list-item]
        tools=[BASH],  # type: ignore[list-item]
        system="Brief.",
    )
    assert counted.input_tokens == len(engine.requests[-1].prompt)


def test_an_answer_that_has_begun_goes_on(http: httpx.Client, engine: FakeEngine) -> None:
    begun = {"role": "assistant", "content": "He said:"}
    answer = http.post(MESSAGES, json={**GOOD, "messages": [ASKED, begun]})
    assert answer.json()["content"][0]["text"] == "Hello, how are you?"
    assert prompt_of(engine).endswith("<|im_start|>assistant\nHe said:")


def test_feedback_is_about_a_message_by_its_id(client: anthropic.Anthropic, url: str) -> None:
    answer = client.messages.create(**GOOD)
    body = {"completion_id": answer.id, "rating": True, "adapter": "helper"}
    stored = httpx.post(f"{url}/v1/feedback", json=body, headers={"x-api-key": "sk-local"})
    assert stored.status_code == 202 and stored.json()["chosen"] == "Hello, how are you?"


def changed(message: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [ASKED, message], **more}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (changed({"role": "user", "content": [{"type": "image", "source": {}}]}),
         "messages[1].content[0]"),
        (changed({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                               "content": [{"type": "image"}]}]}),
         "messages[1].content[0].tool_result.content[0].type"),
        (changed({"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}),
         "messages[1].content[0].tool_use.input"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [BASH, BASH]}, "tools[1]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [BASH], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [BASH], "tool_choice": {"type": "tool", "name": "q"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"mood": "good"}, "mood"),
    ],
)  # fmt: skip
def test_mistakes_are_named(http: httpx.Client, change: dict[str, Any], field: str) -> None:
    body = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    answer = http.post(MESSAGES, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert field in error["error"]["message"], error


def test_errors_have_anthropics_shape(url: str, http: httpx.Client, says: Says) -> None:
    with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(**GOOD)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    with anthropic.Anthropic(base_url=url, auth_token="sk-local", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            client.messages.create(**{**GOOD, "model": "another"})
        assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        long: Any = [{"role": "user", "content": "word " * 9000}]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(**{**GOOD, "messages": long})
    batches = http.get(f"{MESSAGES}/batches")
    assert batches.status_code == 404 and batches.json()["error"]["type"] == "not_found_error"
    assert http.get(MESSAGES).json()["type"] == "error"
    wrong = http.post(MESSAGES, content="{", headers={"content-type": "text/plain"})
    assert wrong.status_code == 415 and wrong.json()["type"] == "error"
    assert http.post("/v1/chat/completions", json={}).json()["error"]["code"] is None


def test_a_failure_in_mid_stream_is_an_event(says: Says) -> None:
    engine = FakeEngine(play=says, info=replace(INFO, max_model_len=4096))
    says.text, says.dies_after = "Hello, how are you?", 2
    with live(make_app(engine)) as url:
        events = events_of(httpx.post(f"{url}{MESSAGES}", json={**GOOD, "stream": True}).text)
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
