"""/v1/chat/completions and /v1/completions with the official client over a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from fake_engine import FakeEngine, Script
from serving import demo_tokenizer, live, make_app
from tandem.core.request import Request
from tandem.core.slo import Slo
from tandem.core.version import AdapterVersion

TEXT = "Hello, how are you today? €"
TOKENS = demo_tokenizer().encode(TEXT, add_special_tokens=False)
TURNS: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def play(request: Request, index: int) -> Script:
    """Choice k leaves out the last k tokens."""
    return Script(tokens=TOKENS[: len(TOKENS) - index])


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    version = AdapterVersion("formal", 2, "hash", "somewhere")
    return FakeEngine(play=play, adapters={"formal": version}, cached_tokens=4)


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with live(make_app(engine)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=TURNS)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens == len(TOKENS) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(TOKENS) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


def test_the_adapter_names_itself(client: openai.OpenAI, engine: FakeEngine) -> None:
    fingerprints = set()
    for model, label, name in (("demo", "base", None), ("demo:formal", "formal@2", "formal")):
        for stream in (False, True):
            raw = client.chat.completions.with_raw_response.create(
                model=model, messages=TURNS, stream=stream
            )
            assert raw.headers["x-tandem-adapter"] == label
            assert engine.requests[-1].adapter == name
            if not stream:
                fingerprints.add(raw.parse().system_fingerprint)
    assert len(fingerprints) == 2


def test_streaming_joins_to_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=TURNS,
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
    )
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == demo_tokenizer().decode(TOKENS[: len(TOKENS) - index])
        assert mine[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * len(TOKENS) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_done_and_is_not_cached(url: str) -> None:
    body = {"model": "demo", "messages": TURNS, "stream": True}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"usage"' not in response.text


def test_stop_and_max_tokens(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.chat.completions.create(model="demo", messages=TURNS, stop=" you")
    assert answer.choices[0].message.content == "Hello, how are"
    assert answer.choices[0].finish_reason == "stop"
    assert engine.aborted[-1] == (engine.requests[-1].request_id, 0)
    answer = client.chat.completions.create(model="demo", messages=TURNS, max_completion_tokens=2)
    assert answer.choices[0].message.content == demo_tokenizer().decode(TOKENS[:2])
    assert answer.choices[0].finish_reason == "length"


def test_chat_logprobs_have_text_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=TURNS, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == TEXT
    assert [entry.logprob for entry in content] == [-token / 1000 for token in TOKENS]
    assert all(len(entry.top_logprobs) == 2 for entry in content)


def test_streamed_logprobs_equal_the_whole_ones(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=TURNS, logprobs=True, stop="day")
    streamed = []
    for chunk in client.chat.completions.create(
        model="demo", messages=TURNS, logprobs=True, stop="day", stream=True
    ):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content == streamed


def test_completions_with_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=["one", "two"], n=2, max_tokens=3, logprobs=1, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [
        prompt + demo_tokenizer().decode(TOKENS[:3]) for prompt in ("one", "one", "two", "two")
    ]
    assert [choice.text for choice in answer.choices] == expected
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.text_offset
        assert logprobs.token_logprobs and logprobs.top_logprobs
        assert "".join(logprobs.tokens) == choice.text
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert choice.text[offset:].startswith(token)
        assert logprobs.token_logprobs[0] is None and logprobs.token_logprobs[1] is not None


def test_completions_take_token_ids_and_default_to_16_tokens(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    client.completions.create(model="demo", prompt=[5, 6, 7])
    assert engine.requests[-1].prompt == (5, 6, 7)
    assert engine.requests[-1].sampling.max_tokens == 16
    stream = client.completions.create(model="demo", prompt=[[5], [6, 7]], stream=True)
    found = {0: "", 1: ""}
    for chunk in stream:
        found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == {0: demo_tokenizer().decode(TOKENS[:16])} | {1: found[0]}


def test_every_sampling_field_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "min_tokens": 3,
        "stop_token_ids": [7, 8],
    }
    client.chat.completions.create(
        model="demo",
        messages=TURNS,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        logit_bias={"11": -100},
        seed=42,
        max_tokens=20,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        extra_body=extra,
    )
    request = engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.1)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert sampling.logit_bias == {11: -100.0}
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (42, 20, 3)
    assert sampling.ignore_eos and sampling.stop_token_ids == (7, 8)


def test_zero_temperature_is_greedy(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.chat.completions.create(model="demo", messages=TURNS, temperature=0)
    assert engine.requests[-1].sampling.greedy


def test_text_parts_are_joined_and_developer_means_system(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    client.chat.completions.create(
        model="demo",
        messages=[
            {"role": "developer", "content": "Be nice."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
            },
            {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": []},
            {"role": "user", "content": "Bye"},
        ],
    )
    text = demo_tokenizer().decode(engine.requests[-1].prompt)
    assert text.startswith("system\nBe nice.\nuser\nHello\nassistant\nHi\nuser\nBye\n")


def test_objectives_come_as_fields_or_headers(client: openai.OpenAI, engine: FakeEngine) -> None:
    headers = {"x-tandem-ttft-slo": "0.5", "X-Tandem-TPOT-SLO": "0.05"}
    for fields, ttft_s in (({}, 0.5), ({"ttft_slo": 2.0}, 2.0)):
        client.chat.completions.create(
            model="demo", messages=TURNS, extra_headers=headers, extra_body=fields
        )
        assert engine.requests[-1].slo == Slo(ttft_s, 0.05)
    client.completions.create(model="demo", prompt="Hi", extra_headers=headers)
    assert engine.requests[-1].slo == Slo(0.5, 0.05)


@pytest.mark.parametrize("text", ["fast", "0", "nan", "inf", "-1", "1e9", ""])
def test_an_objective_of_a_header_is_checked(client: openai.OpenAI, text: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(
            model="demo", prompt="Hi", extra_headers={"x-tandem-tpot-slo": text}
        )
    assert refused.value.param == "x-tandem-tpot-slo"
    assert "header 'x-tandem-tpot-slo': " in refused.value.message
