"""Whatever clients send, they get OpenAI's error shape and a message that names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_engine import FakeEngine
from serving import live, make_app
from tandem.api.fields import CHAT_REFUSED, COMPLETION_REFUSED, UNUSED
from tandem.api.schemas import MAX_STOPS, ChatRequest, CompletionRequest
from tandem.config import ServerConfig

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GOOD_CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
GOOD_COMPLETION: dict[str, Any] = {"model": "demo", "prompt": "Hi"}
BODY_LIMIT = 10_000


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    server = ServerConfig(max_body_bytes=BODY_LIMIT, max_n=8)
    headers = {"content-type": "application/json"}
    with (
        live(make_app(FakeEngine(), server)) as url,
        httpx.Client(base_url=url, headers=headers) as http,
    ):
        yield http


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refused request, checked for its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    return error


def changed(base: dict[str, Any], change: dict[str, Any]) -> bytes:
    return json.dumps({**base, **change}).encode()


NUMBERS = [
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.1}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_tokens": 30, "max_tokens": 20}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop_token_ids": [2048]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"2048": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": [str(k) for k in range(MAX_STOPS + 1)]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 1000}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"priority": 2**40}, "priority"),
    ({"ttft_slo": 0}, "ttft_slo"),
    ({"tpot_slo": 1e9}, "tpot_slo"),
    ({"tpot_slo": "fast"}, "tpot_slo"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"frobnicate": 1}, "frobnicate"),
]


@pytest.mark.parametrize(("change", "param"), NUMBERS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize(
    ("route", "base"), [(CHAT, GOOD_CHAT), (COMPLETIONS, GOOD_COMPLETION)], ids=["chat", "text"]
)
def test_fields_of_both(
    http: httpx.Client, route: str, base: dict[str, Any], change: dict[str, Any], param: str
) -> None:
    error = refused(http.post(route, content=changed(base, change)))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("Hi", "messages"),
    (None, "messages"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"content": "Hi"}], "messages[0].role"),
    ([{"role": "tool", "content": "Hi"}], "messages[0].tool_call_id"),
    ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["Hi"]}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content",
    ),
    (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": [1]},
        ],
        "messages[1].tool_calls[0]",
    ),
    ([{"role": "user", "content": "Hi", "mood": "good"}], "messages[0].mood"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=lambda value: str(value)[:40])
def test_messages(http: httpx.Client, messages: Any, param: str) -> None:
    error = refused(http.post(CHAT, content=changed(GOOD_CHAT, {"messages": messages})))
    assert error["param"] == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"top_logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ],
    ids=str,
)
def test_chat_fields(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert refused(http.post(CHAT, content=changed(GOOD_CHAT, change)))["param"] == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 9}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": 1}, "echo"),
    ],
    ids=str,
)
def test_completion_fields(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    assert (
        refused(http.post(COMPLETIONS, content=changed(GOOD_COMPLETION, change)))["param"] == param
    )


def test_n_is_bounded_before_it_is_multiplied(http: httpx.Client) -> None:
    change = {"n": 10**4298, "prompt": ["a"] * 50}
    error = refused(http.post(COMPLETIONS, content=changed(GOOD_COMPLETION, change)))
    assert error["param"] == "n" and "'n': must be at most" in error["message"]


@pytest.mark.parametrize("name", sorted(CHAT_REFUSED))
def test_unsupported_chat_fields_are_refused_by_name_unless_at_their_default(
    http: httpx.Client, name: str
) -> None:
    body = changed(GOOD_CHAT, {name: {"something": "else"}})
    error = refused(http.post(CHAT, content=body))
    assert error["param"] == name and name in error["message"]
    assert error["code"] == "unsupported_parameter"
    for default in (None, *CHAT_REFUSED[name].defaults):
        assert http.post(CHAT, content=changed(GOOD_CHAT, {name: default})).status_code == 200


@pytest.mark.parametrize("name", sorted(COMPLETION_REFUSED))
def test_unsupported_completion_fields_are_refused_by_name(http: httpx.Client, name: str) -> None:
    body = changed(GOOD_COMPLETION, {name: "else"})
    assert refused(http.post(COMPLETIONS, content=body))["param"] == name


def test_unused_fields_are_accepted(http: httpx.Client) -> None:
    body = changed(GOOD_CHAT, dict.fromkeys(UNUSED, "x"))
    assert http.post(CHAT, content=body).status_code == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"{}", b'{"model":', b"[" * 5000, b"{} x"],
    ids=repr,
)
def test_bodies_that_are_no_request(http: httpx.Client, content: bytes) -> None:
    for route in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        if (route, content) != ("/tokenize", b"{}"):
            refused(http.post(route, content=content))


def test_an_unknown_model_lists_the_known(http: httpx.Client) -> None:
    error = refused(http.post(CHAT, content=changed(GOOD_CHAT, {"model": "gpt-4"})), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "gpt-4" in error["message"] and "demo" in error["message"]


def test_a_prompt_that_is_too_long_says_the_numbers(http: httpx.Client) -> None:
    error = refused(http.post(COMPLETIONS, content=changed(GOOD_COMPLETION, {"prompt": [9] * 300})))
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"] and "300" in error["message"]


def test_a_body_that_is_too_large(http: httpx.Client) -> None:
    large = changed(GOOD_CHAT, {"user": "x" * BODY_LIMIT})
    error = refused(http.post(CHAT, content=large), 413)
    assert str(BODY_LIMIT) in error["message"]

    def chunks() -> Iterator[bytes]:
        for place in range(0, len(large), 1000):
            yield large[place : place + 1000]

    refused(http.post(CHAT, content=chunks()), 413)
    assert http.post(CHAT, json=GOOD_CHAT).status_code == 200


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    assert refused(http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    error = refused(http.get(CHAT), 405)
    assert error["code"] == "method_not_allowed" and "POST" in error["message"]
    assert refused(http.put("/v1/models"), 405)
    assert http.get(CHAT).headers["allow"] == "POST"
    assert http.options(CHAT).status_code == 405
    assert "access-control-allow-origin" not in http.post(CHAT, json=GOOD_CHAT).headers


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    sorted(ChatRequest.model_fields | CompletionRequest.model_fields | CHAT_REFUSED)
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=st.dictionaries(FIELDS, JSON, min_size=1, max_size=3))
def test_no_input_makes_the_server_fail(http: httpx.Client, change: dict[str, Any]) -> None:
    for route, base in ((CHAT, GOOD_CHAT), (COMPLETIONS, GOOD_COMPLETION)):
        response = http.post(route, content=changed(base, change))
        assert response.status_code in (200, 400, 404), response.text
        if response.status_code != 200:
            refused(response, response.status_code)
