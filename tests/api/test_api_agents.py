"""Coding agents turn after turn: answers come back as Codex and Claude Code send them back.

The fields are those that OpenAI and Anthropic document for these programs and their APIs. What a
turn adds follows what was served, so that the next prompt is found in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import pytest

from dialects import CODEX_FIELDS, SHELL, Says, events_of, function_tool, prompt_of
from fake_engine import INFO, FakeEngine
from serving import live, make_app
from tandem.api.responses.schemas import ResponsesRequest
from tandem.api.tools import NamedChoice

CALLED = '<tool_call>[{"name": "shell", "arguments": {"command": "ls"}}, ' \
    '{"name": "mcp__files.read", "arguments": {"path": "a.txt"}}]</tool_call>'  # fmt: skip
CODEX_HEADERS = {
    "accept": "text/event-stream",
    "originator": "codex_cli_rs",
    "session-id": "0199-session",
    "thread-id": "0199-thread",
    "x-codex-turn-metadata": "{}",
}
READ = function_tool("read", "Reads a file", "path")
CODEX: dict[str, Any] = {
    **CODEX_FIELDS,
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "<permissions>all</permissions>"}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "<environment>Linux</environment>"}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "What is here?"}]},
    ],
    "tools": [
        SHELL,
        {"type": "custom", "name": "apply_patch", "description": "Edits files",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__files", "description": "Files",
         "tools": [READ, {"type": "custom", "name": "write"}]},
    ],
}  # fmt: skip
CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,"
    "context-management-2025-06-27,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.1.231 (external, cli)",
    "x-app": "cli",
    "x-claude-code-session-id": "1",
    "x-stainless-retry-count": "0",
}
BASH: dict[str, Any] = {
    "name": "shell",
    "description": "Runs a command",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CLAUDE: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32_000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.231; cch=31f2c;"},
        {"type": "text", "text": "You are a coding agent.", **CACHED},
    ],
    "tools": [BASH, {**BASH, "name": "mcp__files.read", "strict": False, **CACHED}],
    "metadata": {"user_id": '{"device_id":"1","session_id":"2"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Be careful.</system-reminder>"},
            {"type": "text", "text": "What is here?", **CACHED}]},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def says() -> Says:
    return Says(CALLED)


@pytest.fixture(scope="module")
def engine(says: Says) -> FakeEngine:
    info = replace(INFO, max_model_len=8192)
    return FakeEngine(play=says, info=info, cached_tokens=4)


@pytest.fixture
def http(engine: FakeEngine, says: Says) -> Iterator[httpx.Client]:
    says.text = CALLED
    with live(make_app(engine)) as url, httpx.Client(base_url=url) as http:
        yield http


def codex_turn(http: httpx.Client, items: list[Any]) -> list[dict[str, Any]]:
    """The items that a stream completes."""
    body = {**CODEX, "input": items}
    answer = http.post("/v1/responses", json=body, headers=CODEX_HEADERS)
    assert answer.status_code == 200, answer.text
    events = events_of(answer.text)
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["usage"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    return done


def test_codex_goes_on_after_its_calls(http: httpx.Client, engine: FakeEngine, says: Says) -> None:
    done = codex_turn(http, CODEX["input"])
    first = prompt_of(engine)
    assert '"name": "mcp__files.read"' in first and "apply_patch" not in first
    assert [(item.get("namespace"), item["name"]) for item in done] == [
        (None, "shell"),
        ("mcp__files", "read"),
    ]
    for item in done:
        item.pop("status")  # Codex keeps none
    results = [
        {"type": "function_call_output", "call_id": done[0]["call_id"], "output": "a.txt"},
        {"type": "function_call_output", "call_id": done[1]["call_id"],
         "output": [{"type": "input_text", "text": "Hi"}]},
    ]  # fmt: skip
    says.text = "Here is a.txt."
    said = codex_turn(http, [*CODEX["input"], *done, *results])
    second = prompt_of(engine)
    assert second.startswith(first + CALLED) and "Hi" in second[len(first + CALLED) :]
    more = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "OK"}]}
    codex_turn(http, [*CODEX["input"], *done, *results, *said, more])
    assert prompt_of(engine).startswith(second + says.text)


def namespace(name: str, *functions: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": function} for function in functions]
    return {"type": "namespace", "name": name, "tools": tools}


def test_a_choice_may_name_a_function_of_a_namespace() -> None:
    choice = {"type": "function", "namespace": "mcp__files", "name": "read"}
    body = ResponsesRequest.model_validate({**CODEX, "tool_choice": choice})
    assert isinstance(body.tool_choice, NamedChoice)
    assert body.tool_choice.function.name == "mcp__files.read"


@pytest.mark.parametrize("namespace", [{"namespace": "mcp__files"}, {}])
def test_a_choice_is_repeated_as_it_was_sent(http: httpx.Client, namespace: dict[str, str]) -> None:
    choice = {"type": "function", "name": "read" if namespace else "shell", **namespace}
    body = {**CODEX, "stream": False, "tool_choice": choice}
    assert http.post("/v1/responses", json=body).json()["tool_choice"] == choice


def test_a_namespace_is_repeated_and_its_mistakes_are_named(http: httpx.Client) -> None:
    body = {**CODEX, "stream": False}
    told = http.post("/v1/responses", json=body).json()["tools"]
    assert [tool["name"] for tool in told] == ["shell", "mcp__files"]
    assert [inner["name"] for inner in told[1]["tools"]] == ["read"]
    for tools, param in (
        ([{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}], "tools[0]"),
        ([{"type": "web_search"}, {"type": "namespace", "name": "a"}], "tools[1]"),
        ([namespace("n", "f" * 255)], "tools[0]"),
        (
            [namespace(f"n{place}", *(f"f{each}" for each in range(100))) for place in range(9)],
            "tools",
        ),
    ):
        error = http.post("/v1/responses", json={**body, "tools": tools}).json()["error"]
        assert error["param"].startswith(param) and error["type"] == "invalid_request_error"


def test_reasoning_comes_back_to_the_turn_that_it_led_to() -> None:
    def thought(text: str) -> dict[str, Any]:
        words = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": "rs_1", "summary": [], "content": words}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "Hi"},
        thought("I look."),
        {"role": "assistant", "content": "Let me look."},
        thought(" Now."),
        call,
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {**call, "call_id": "d"},
        thought("lost"),
        {"role": "user", "content": "Go on."},
    ]
    turns = ResponsesRequest.model_validate({"model": "demo", "input": items}).turns()
    assert [turn.get("reasoning_content") for turn in turns] == [
        None, "I look. Now.", None, None, None,
    ]  # fmt: skip
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "assistant", "user"]


def claude_turn(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The message that a stream adds up to, as the client keeps it."""
    answer = http.post("/v1/messages?beta=true", json=body, headers=CLAUDE_HEADERS)
    assert answer.status_code == 200, answer.text
    blocks: list[dict[str, Any]] = []
    for event in events_of(answer.text):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            [name] = event["delta"].keys() - {"type"}
            field = "input" if name == "partial_json" else name
            blocks[-1][field] = (blocks[-1][field] or "") + event["delta"][name]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"] or "{}")
    return {"role": "assistant", "content": blocks}


def test_claude_code_goes_on_after_its_calls(
    http: httpx.Client, engine: FakeEngine, says: Says
) -> None:
    answer = claude_turn(http, CLAUDE)
    first = prompt_of(engine)
    assert "billing" not in first and "Be careful." in first
    [shell, read] = answer["content"]
    results = {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": shell["id"], "content": "a.txt"},
        {"type": "tool_result", "tool_use_id": read["id"], "is_error": True,
         "content": [{"type": "text", "text": "no such file"}], **CACHED},
    ]}  # fmt: skip
    says.text = "Here is a.txt."
    body = {**CLAUDE, "messages": [*CLAUDE["messages"], answer, results]}
    said = claude_turn(http, body)
    second = prompt_of(engine)
    assert second.startswith(first + CALLED) and "no such file" in second
    counted = {name: body[name] for name in ("model", "system", "tools", "messages", "thinking")}
    answered = http.post(
        "/v1/messages/count_tokens?beta=true", json=counted, headers=CLAUDE_HEADERS
    )
    assert answered.json() == {"input_tokens": len(engine.requests[-1].prompt)}
    note = {"role": "system", "content": "The user is away."}
    more = {"role": "user", "content": [{"type": "text", "text": "OK"}]}
    claude_turn(http, {**body, "messages": [*body["messages"], said, note, more]})
    assert prompt_of(engine).startswith(second + says.text) and "is away" in prompt_of(engine)


def test_models_are_listed_as_agents_ask_for_them(http: httpx.Client) -> None:
    for query in ("?client_version=0.150.0", "?limit=1000", "?beta=true"):
        assert [each["id"] for each in http.get(f"/v1/models{query}").json()["data"]] == ["demo"]
    with anthropic.Anthropic(base_url=str(http.base_url), api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").id == "demo"
