"""Tools on /v1/chat/completions, with the official client over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from fake_engine import INFO, FakeEngine, Script
from serving import demo_tokenizer, live, make_app
from tandem.core.request import Request

CHAT = "/v1/chat/completions"
CALLS = '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}, ' \
    '{"name": "weather", "arguments": {"city": "Rome"}}]</tool_call>'  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
}
ASKED: dict[str, Any] = {"role": "user", "content": "Weather in Paris?"}
GOOD: dict[str, Any] = {"model": "demo", "messages": [ASKED], "tools": [TOOL]}


class Says:
    """An engine's script whose text a test chooses."""

    def __init__(self) -> None:
        self.text = CALLS

    def __call__(self, request: Request, index: int) -> Script:
        return Script(tokens=demo_tokenizer().encode(self.text, add_special_tokens=False))


@pytest.fixture(scope="module")
def says() -> Says:
    return Says()


@pytest.fixture(scope="module")
def engine(says: Says) -> FakeEngine:
    return FakeEngine(play=says, info=replace(INFO, max_model_len=8192, recording_tokens=8192))


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with live(make_app(engine)) as url:
        yield url


@pytest.fixture
def http(url: str, says: Says) -> Iterator[httpx.Client]:
    says.text = CALLS
    with httpx.Client(base_url=url) as http:
        yield http


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(engine: FakeEngine) -> str:
    """What the model was asked last, with special tokens."""
    tokenizer = demo_tokenizer()
    return b"".join(map(tokenizer.token_bytes, engine.requests[-1].prompt)).decode()


def test_a_whole_answer_calls_tools(http: httpx.Client, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GOOD)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    calls = choice.message.tool_calls
    assert calls is not None and len({call.id for call in calls}) == 2
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Paris", "Rome"]  # type: ignore[union-attr]
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)


def test_a_stream_says_what_the_whole_answer_says(
    http: httpx.Client, client: openai.OpenAI, says: Says
) -> None:
    says.text = f"Let me see.\n{CALLS}"
    whole = client.chat.completions.create(**GOOD, n=2).choices
    chunks = list(client.chat.completions.create(**GOOD, n=2, stream=True))
    for index, choice in enumerate(whole):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        pieces = [piece for part in mine for piece in part.delta.tool_calls or []]
        assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
        named = [piece for piece in pieces if piece.id]
        assert [piece.index for piece in named] == [0, 1]
        assert all(piece.function.name == "weather" for piece in named)  # type: ignore[union-attr]
        assert len(pieces) > 6  # arguments come in pieces, and without a name
        assert all(p.function.name is None for p in pieces if not p.id)  # type: ignore[union-attr]
        for call in choice.message.tool_calls or []:
            place = (choice.message.tool_calls or []).index(call)
            told = [p.function.arguments for p in pieces if p.index == place]  # type: ignore[union-attr]
            assert "".join(text or "" for text in told) == call.function.arguments  # type: ignore[union-attr]
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert choice.message.content == "Let me see."
        assert mine[-1].finish_reason == choice.finish_reason == "tool_calls"
        assert {part.finish_reason for part in mine[:-1]} == {None}


def test_the_client_helper_gathers_the_stream(client: openai.OpenAI, says: Says) -> None:
    says.text = CALLS
    with client.chat.completions.stream(**GOOD) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None and [call.function.name for call in calls] == ["weather", "weather"]


def test_tools_are_offered_and_history_is_rendered_once(
    http: httpx.Client, engine: FakeEngine
) -> None:
    first = {"id": "call_1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Nîmes"}'}}  # fmt: skip
    for empty in ("", None):
        second = {**first, "id": "call_2", "function": {"name": "weather", "arguments": empty}}
        turns = [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [first, second]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Sun"},
            {
                "role": "tool",
                "tool_call_id": "call_2",
                "content": [{"type": "text", "text": "No "}, {"type": "text", "text": "city"}],
            },
        ]
        answer = http.post(CHAT, json={**GOOD, "messages": turns})
        assert answer.status_code == 200, answer.text
        prompt = prompt_of(engine)
        assert '<tools>[{"name": "weather"' in prompt
        assert '{"name": "weather", "arguments": {"city": "Nîmes"}}' in prompt
        assert '{"name": "weather", "arguments": {}}' in prompt
        assert "<tool_response>\nSun\n</tool_response>" in prompt and "No city" in prompt
    cut = {**first, "function": {"name": "weather", "arguments": '{"city": "Ni'}}
    turns[1] = {"role": "assistant", "content": "", "tool_calls": [cut]}
    assert http.post(CHAT, json={**GOOD, "messages": turns}).status_code == 200
    assert json.dumps('{"city": "Ni') in prompt_of(engine)


def test_tool_choice_none_offers_no_tools(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post(CHAT, json={**GOOD, "tool_choice": "none"}).json()["choices"][0]
    assert "<tools>" not in prompt_of(engine)
    assert answer["message"]["content"] == CALLS and "tool_calls" not in answer["message"]
    assert answer["finish_reason"] == "stop"
    plain = http.post(CHAT, json={"model": "demo", "messages": [ASKED]}).json()["choices"][0]
    assert plain["message"]["content"] == CALLS


def test_one_call_at_a_time(http: httpx.Client) -> None:
    body = {**GOOD, "parallel_tool_calls": False, "tool_choice": "auto"}
    message = http.post(CHAT, json=body).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ("auto", None),
        ("none", None),
        ("required", ["weather", "clock"]),
        ({"type": "function", "function": {"name": "clock"}}, ["clock"]),
    ],
)
def test_a_call_is_forced_by_a_grammar(
    http: httpx.Client, engine: FakeEngine, choice: Any, forced: list[str] | None
) -> None:
    body = {**GOOD, "tools": [TOOL, tool(name="clock")], "tool_choice": choice}
    assert http.post(CHAT, json=body).status_code == 200
    grammar = engine.requests[-1].sampling.grammar
    names = [name for name in ("weather", "clock") if grammar and f'\\"{name}\\"' in grammar.text]
    assert (names or None) == forced
    assert grammar is None or ("call)*" in grammar.text) is (choice == "required")


def test_beside_a_schema_an_answer_may_still_call(http: httpx.Client, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"degrees": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    body = {**GOOD, "response_format": form}
    message = http.post(CHAT, json=body).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 2
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None and "(calls | other)" in grammar.text and "degrees" in grammar.text
    forced = {**body, "tool_choice": "required"}  # which leaves no text to have a form
    message = http.post(CHAT, json=forced).json()["choices"][0]["message"]
    grammar = engine.requests[-1].sampling.grammar
    assert len(message["tool_calls"]) == 2 and not message["content"]
    assert grammar is not None and "other" not in grammar.text


def test_a_cut_call_ends_with_length(http: httpx.Client) -> None:
    for stream in (False, True):
        answer = http.post(CHAT, json={**GOOD, "max_tokens": 30, "stream": stream})
        assert '"finish_reason":"length"' in answer.text and "tool_calls" in answer.text


def test_a_call_that_a_stop_string_cuts_ends_with_stop(http: httpx.Client) -> None:
    for stream in (False, True):
        answer = http.post(CHAT, json={**GOOD, "stop": "Rome", "stream": stream})
        assert '"finish_reason":"stop"' in answer.text and '"stop_reason":"Rome"' in answer.text
        assert '"finish_reason":"tool_calls"' not in answer.text


def test_a_text_answer_beside_tools_is_text(http: httpx.Client, says: Says) -> None:
    says.text = "It is 2 < 3 degrees."
    message = http.post(CHAT, json=GOOD).json()["choices"][0]
    assert message["message"]["content"] == says.text and message["finish_reason"] == "stop"
    streamed = http.post(CHAT, json={**GOOD, "stream": True}).text
    parts = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in parts) == says.text


def tool(**changes: Any) -> dict[str, Any]:
    return {**TOOL, "function": {**TOOL["function"], **changes}}


def calls(*made: Any, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": role, "content": "x", "tool_calls": list(made), **more}]}


CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters"),
        ({"tools": [tool(other=1)]}, "tools[0].function.other"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "q"}}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        (calls({**CALL, "id": 1}), "messages[1].tool_calls[0].id"),
        (calls({**CALL, "function": {"name": "f", "arguments": {}}}),
         "messages[1].tool_calls[0].function.arguments"),
        (calls(CALL, role="user"), "messages[1].tool_calls"),
        (calls(tool_call_id="a"), "messages[1].tool_call_id"),
        ({"messages": [ASKED, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": []}]}, "messages[1].content"),
        ({"functions": [{}]}, "functions"),
    ],
)  # fmt: skip
def test_mistakes_are_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    answer = http.post(CHAT, json={**GOOD, **change})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text


def test_not_finite_numbers_in_a_schema_are_refused(http: httpx.Client) -> None:
    body = json.dumps({**GOOD, "tools": [tool(parameters={"maximum": float("inf")})]})
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.json()["error"]["param"] == "tools[0].function.parameters.maximum"


def test_tokenize_renders_the_tools(http: httpx.Client, engine: FakeEngine) -> None:
    http.post(CHAT, json=GOOD)
    tokens = http.post("/tokenize", json={"messages": [ASKED], "tools": [TOOL]}).json()["tokens"]
    assert tuple(tokens) == engine.requests[-1].prompt


def test_feedback_about_a_call_needs_the_completion(http: httpx.Client) -> None:
    completion = http.post(CHAT, json=GOOD).json()["id"]
    body = {"completion_id": completion, "rating": True, "adapter": "helper"}
    stored = http.post("/v1/feedback", json=body).json()
    assert stored["chosen"] == CALLS and not stored["samples"][0]["problem"]
    turns = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    about: dict[str, Any] = {"messages": turns, "rating": True, "adapter": "helper"}
    refused = http.post("/v1/feedback", json=about)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages[1]"
    history = [*turns, {"role": "tool", "tool_call_id": "a", "content": "Sun"}]
    completion = http.post(CHAT, json={**GOOD, "messages": history}).json()["id"]
    body = {"completion_id": completion, "demonstration": "Sunny.", "adapter": "helper"}
    stored = http.post("/v1/feedback", json=body).json()
    assert stored["chosen"] == "Sunny." and not stored["samples"][0]["problem"]


def test_lines_of_a_batch_call_tools(http: httpx.Client, says: Says) -> None:
    line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": GOOD}
    form = {"purpose": "batch"}
    file = http.post("/v1/files", files={"file": json.dumps(line).encode()}, data=form).json()["id"]
    made = http.post("/v1/batches", json={"input_file_id": file, "endpoint": CHAT,
                                          "completion_window": "24h"}).json()["id"]  # fmt: skip
    while (batch := http.get(f"/v1/batches/{made}").json())["status"] != "completed":
        assert batch["status"] != "failed", batch
    output = http.get(f"/v1/files/{batch['output_file_id']}/content").json()
    message = output["response"]["body"]["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "weather"]
