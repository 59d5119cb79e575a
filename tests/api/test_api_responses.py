"""OpenAI's Responses API with OpenAI's own client, over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from dialects import CODEX_FIELDS, SHELL, Says, events_of, prompt_of
from fake_engine import INFO, FakeEngine, Script
from serving import DEMO_MODEL, live, make_app
from tandem.services.answering.tokenizer import Tokenizer

RESPONSES = "/v1/responses"
CALLS = '<tool_call>[{"name": "shell", "arguments": {"command": "ls"}}, ' \
    '{"name": "shell", "arguments": {"command": "pwd"}}]</tool_call>'  # fmt: skip
GOOD: dict[str, Any] = {"model": "demo", "input": "What is here?"}
CODEX: dict[str, Any] = {
    **CODEX_FIELDS,
    "input": [
        {"type": "message", "role": "developer",
         "content": [{"type": "input_text", "text": "<permissions>all</permissions>"}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "What is here?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "shell",
         "arguments": '{"command": "ls"}', "status": "completed"},
        {"type": "function_call", "call_id": "call_2", "name": "shell", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
        {"type": "function_call_output", "call_id": "call_2",
         "output": [{"type": "input_text", "text": "no command"}]},
    ],
    "tools": [
        SHELL,
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def says() -> Says:
    return Says(CALLS)


@pytest.fixture(scope="module")
def engine(says: Says) -> FakeEngine:
    return FakeEngine(play=says, info=replace(INFO, max_model_len=4096), cached_tokens=4)


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with live(make_app(engine)) as url:
        yield url


@pytest.fixture
def client(url: str, says: Says) -> Iterator[openai.OpenAI]:
    says.text = "Hello, how are you?"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def http(url: str, says: Says) -> Iterator[httpx.Client]:
    says.text = "Hello, how are you?"
    with httpx.Client(base_url=url) as http:
        yield http


def numbered(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose numbers count up."""
    made = events_of(text)
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    return made


def test_a_response(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.responses.create(**GOOD, instructions="Be brief.")
    assert answer.id.startswith("resp_") and answer.status == "completed"
    assert answer.output_text == "Hello, how are you?" and answer.model == "demo"
    assert answer.usage is not None and answer.usage.input_tokens_details.cached_tokens == 4
    assert answer.usage.input_tokens == len(engine.requests[-1].prompt)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt_of(engine)


def test_a_response_counts_the_tokens_of_its_reasoning() -> None:
    backend = AutoTokenizer.from_pretrained(str(DEMO_MODEL))
    backend.chat_template += "{# <think> #}"
    tokenizer = Tokenizer(backend)
    thought, answer, alone = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("<think>\nHm, what?", "\n</think>\n\nHello there", "Hello there")
    )
    engine = FakeEngine(play=lambda r, i: Script(tokens=(*thought, *answer)))
    with live(make_app(engine, tokenizer=tokenizer)) as url:
        whole = httpx.post(f"{url}{RESPONSES}", json=GOOD).json()
        events = events_of(httpx.post(f"{url}{RESPONSES}", json={**GOOD, "stream": True}).text)
        engine.play = lambda r, i: Script(tokens=alone)
        brief = httpx.post(f"{url}{RESPONSES}", json=GOOD).json()
    for response in (whole, events[-1]["response"]):
        assert [item["content"][0]["text"] for item in response["output"]] == [
            "Hm, what?",
            "Hello there",
        ]
        told = response["usage"]["output_tokens_details"]
        assert told == {"reasoning_tokens": len(thought)}
    assert brief["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert [item["content"][0]["text"] for item in brief["output"]] == ["Hello there"]


def test_a_response_tells_its_service_tier(client: openai.OpenAI) -> None:
    assert client.responses.create(**GOOD).service_tier == "default"
    for asked, told in (("flex", "flex"), ("auto", "default")):
        answer = client.responses.create(**GOOD, service_tier=asked)  # type: ignore[call-overload]
        assert answer.service_tier == told


def test_a_response_calls_functions(client: openai.OpenAI, says: Says) -> None:
    says.text = f"I look.\n{CALLS}"
    answer = client.responses.create(**GOOD, tools=[SHELL])  # type: ignore[list-item]
    assert [item.type for item in answer.output] == ["message", "function_call", "function_call"]
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [json.loads(call.arguments)["command"] for call in calls] == ["ls", "pwd"]
    assert len({call.call_id for call in calls}) == len({call.id for call in calls}) == 2
    answer = client.responses.create(**GOOD, tools=[SHELL], parallel_tool_calls=False)  # type: ignore[list-item]
    assert [item.type for item in answer.output] == ["message", "function_call"]


@pytest.mark.parametrize("text", ["Hello, how are you?", f"I look.\n{CALLS}", CALLS])
def test_a_stream_adds_up_to_the_whole_response(
    client: openai.OpenAI, says: Says, text: str
) -> None:
    says.text = text
    whole = client.responses.create(**GOOD, tools=[SHELL])  # type: ignore[list-item]
    with client.responses.stream(**GOOD, tools=[SHELL]) as stream:  # type: ignore[list-item]
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"

    def said(output: Any) -> list[Any]:
        return [
            (item.type, item.content[0].text if item.type == "message" else item.arguments)
            for item in output
        ]

    assert said(final.output) == said(whole.output)
    assert final.usage == whole.usage and final.status == whole.status


def test_a_request_of_codex(http: httpx.Client, engine: FakeEngine, says: Says) -> None:
    says.text = f"I look.\n{CALLS}"
    answer = http.post(RESPONSES, json=CODEX)
    assert answer.status_code == 200, answer.text
    events = numbered(answer.text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    shortened = [kind for k, kind in enumerate(kinds) if kinds[k - 1 : k] != [kind]]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
            "output_item.done"]  # fmt: skip
    assert shortened == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", *call, *call, "completed",
    ]  # fmt: skip
    pieces = [e["delta"] for e in events if e.get("output_index") == 1 and "delta" in e]
    assert len(pieces) > 2 and json.loads("".join(pieces)) == {"command": "ls"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    prompt = prompt_of(engine)
    assert "You are a coding agent.\n\n<permissions>all</permissions>\n\n" in prompt
    assert '<tools>[{"name": "shell"' in prompt and "apply_patch" not in prompt
    assert 'I look.\n<tool_call>[{"name": "shell", "arguments": {"command": "ls"}}, {' in prompt
    assert "a.txt\n</tool_response>\n<tool_response>\nno command" in prompt


def test_a_call_is_forced(client: openai.OpenAI, engine: FakeEngine) -> None:
    for choice in ("required", {"type": "function", "name": "shell"}):
        client.responses.create(**GOOD, tools=[SHELL], tool_choice=choice)  # type: ignore[arg-type, list-item]
        grammar = engine.requests[-1].sampling.grammar
        assert grammar is not None and '\\"shell\\"' in grammar.text


def test_text_must_match_a_format(client: openai.OpenAI, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"type": "json_schema", "name": "a", "schema": schema, "strict": False}
    answer = client.responses.create(**GOOD, text={"format": form})
    grammar = engine.requests[-1].sampling.grammar
    closed = {**schema, "additionalProperties": False}
    assert grammar is not None and json.loads(grammar.text) == closed
    assert answer.text is not None and answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    client.responses.create(**GOOD, text={"format": {"type": "json_object"}})
    assert engine.requests[-1].sampling.grammar is not None
    client.responses.create(**GOOD, text={"format": {"type": "text"}})
    assert engine.requests[-1].sampling.grammar is None


def test_a_cut_answer_is_incomplete(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.responses.create(**GOOD, max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    streamed = http.post(RESPONSES, json={**GOOD, "max_output_tokens": 2, "stream": True})
    events = numbered(streamed.text)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


def test_what_is_stored_is_the_receipt(client: openai.OpenAI, url: str) -> None:
    answer = client.responses.create(**GOOD)
    about = {"completion_id": answer.id, "rating": True, "adapter": "helper"}
    assert httpx.post(f"{url}/v1/feedback", json=about).status_code == 202
    about["completion_id"] = client.responses.create(**GOOD, store=False).id
    assert httpx.post(f"{url}/v1/feedback", json=about).status_code == 404
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(answer.id)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"type": "reasoning"}], "tools": [SHELL]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].message.content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
         "input[0].function_call.call_id"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [SHELL], "tool_choice": {"type": "function", "name": "q"}}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"mood": "good"}, "mood"),
    ],
)  # fmt: skip
def test_mistakes_are_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    body = {name: value for name, value in {**GOOD, **change}.items() if value is not None}
    answer = http.post(RESPONSES, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text


def test_a_failure_in_mid_stream_is_an_event(says: Says) -> None:
    engine = FakeEngine(play=says, info=replace(INFO, max_model_len=4096))
    says.text, says.dies_after = "Hello, how are you?", 2
    with live(make_app(engine)) as url:
        events = numbered(httpx.post(f"{url}{RESPONSES}", json={**GOOD, "stream": True}).text)
    says.dies_after = None
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"


def test_embeddings_are_refused_by_name(http: httpx.Client) -> None:
    refused = http.post("/v1/embeddings", json={"model": "demo", "input": "x"})
    error = refused.json()["error"]
    assert refused.status_code == 404 and error["code"] == "not_supported"
    assert "/v1/embeddings" in error["message"]
