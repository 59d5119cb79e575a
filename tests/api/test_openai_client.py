"""The official client against the real engine and the bundled demo model."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
from openai.types.chat import ChatCompletionMessageParam
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_serving import live_engine
from patience import eventually
from serving import DEMO_MODEL, sent
from tandem.config import resolve

TURNS: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count to 5."}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = resolve(
        {
            "model": {"model": "demo", "dtype": "float32", "threads": 1},
            "cache": {"memory_bytes": 64 << 20},
            "server": {"max_n": 8, "max_body_bytes": 100_000},
        }
    )
    with live_engine(settings) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


ABORTED = r'tandem_request_success_total\{finished_reason="abort"\} (\S+)'


def metric(url: str, name: str) -> float:
    """The value of a metric without labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def aborted(url: str) -> float:
    """Choices whose client has left."""
    found = re.search(ABORTED, httpx.get(f"{url}/metrics").text)
    return float(found[1]) if found else 0.0


def wait_until_idle(url: str) -> None:
    """Nothing runs and no block is held any more."""
    names = ("tandem_num_requests_running", "tandem_num_requests_waiting", "tandem_kv_blocks_used")
    eventually(lambda: not any(metric(url, name) for name in names))


def test_chat_answers_sensibly_and_stops(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=TURNS, temperature=0)
    text = answer.choices[0].message.content
    assert text and answer.choices[0].finish_reason == "stop"
    assert "1, 2, 3, 4, 5" in text
    assert answer.usage is not None and answer.usage.completion_tokens > 1


def test_streaming_equals_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=TURNS, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=TURNS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 3


def test_an_equal_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me more. " * 20}]
    cached = []
    for _ in range(2):
        answer = client.chat.completions.create(model="demo", messages=turns, max_tokens=1)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[0] < 16 < cached[1]


def test_the_same_seed_gives_the_same_answers_and_choices_differ(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="demo", messages=TURNS, n=3, seed=seed, temperature=2, max_tokens=30
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = ask(1)
    assert ask(1) == first
    assert ask(2) != first
    assert len(set(first)) == 3


def test_completions_echo_and_logprobs_agree_with_generation(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    answer = client.completions.create(
        model="demo", prompt=prompt, max_tokens=6, temperature=0, logprobs=3
    )
    made = answer.choices[0].logprobs
    assert made is not None and made.tokens and made.token_logprobs and made.top_logprobs
    assert "".join(made.tokens) == answer.choices[0].text
    for token, logprob, top in zip(
        made.tokens, made.token_logprobs, made.top_logprobs, strict=True
    ):
        assert logprob is not None and logprob <= 0
        assert len(top) == 3 and max(top, key=lambda other: top[other]) == token
    scored = client.completions.create(
        model="demo",
        prompt=prompt + answer.choices[0].text,
        max_tokens=0,
        echo=True,
        logprobs=1,
    )
    again = scored.choices[0].logprobs
    assert scored.choices[0].text == prompt + answer.choices[0].text
    assert again is not None and again.tokens and again.token_logprobs
    assert again.token_logprobs[0] is None
    size = len(made.tokens)
    assert again.tokens[-size:] == made.tokens
    assert again.token_logprobs[-size:] == pytest.approx(made.token_logprobs, abs=1e-3)


@pytest.mark.parametrize("rest", [" Paris.", " is 12, I think"])
def test_log_likelihoods_are_transformers_own(client: openai.OpenAI, rest: str) -> None:
    """As lm-eval asks for them: token ids, echo, one token more, and whether greedy."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    context = tokenizer("The capital of France is")["input_ids"]
    tokens = context + tokenizer(rest, add_special_tokens=False)["input_ids"]
    answer = client.completions.create(
        model="demo", prompt=tokens, max_tokens=1, temperature=0, echo=True, logprobs=1
    )
    logits = model(torch.tensor([tokens])).logits[0].detach().double()
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    given = answer.choices[0].logprobs
    assert given is not None and given.token_logprobs and given.top_logprobs and given.tokens
    scored = slice(len(context), len(tokens))
    assert given.token_logprobs[scored] == pytest.approx(
        expected[len(context) - 1 :].tolist(), abs=1e-3
    )
    best = logits.argmax(-1)[len(context) - 1 : -1].tolist() == tokens[len(context) :]
    tops = zip(given.tokens[scored], given.top_logprobs[scored], strict=True)
    assert all(max(top, key=lambda other: top[other]) == token for token, top in tops) is best


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=TURNS, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    assert all(entry.top_logprobs[0].token == entry.token for entry in logprobs.content)


def test_stop_max_tokens_and_logit_bias(client: openai.OpenAI, url: str) -> None:
    whole = client.chat.completions.create(model="demo", messages=TURNS, temperature=0)
    text = whole.choices[0].message.content or ""
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = client.chat.completions.create(
        model="demo", messages=TURNS, temperature=0, stop=[stop]
    )
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    answer = client.chat.completions.create(
        model="demo", messages=TURNS, temperature=0, max_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    only = httpx.post(f"{url}/tokenize", json={"prompt": "a"}).json()["tokens"][0]
    answer = client.chat.completions.create(
        model="demo",
        messages=TURNS,
        temperature=0,
        max_tokens=4,
        logit_bias={str(only): 100},
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content == "aaaa"


def test_closing_a_stream_frees_its_blocks(client: openai.OpenAI, url: str) -> None:
    wait_until_idle(url)
    stream = client.chat.completions.create(
        model="demo",
        messages=TURNS,
        stream=True,
        n=3,
        max_tokens=1500,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert metric(url, "tandem_num_requests_running") == 3
    assert metric(url, "tandem_kv_blocks_used") > 0
    left = aborted(url)
    stream.close()
    eventually(lambda: aborted(url) == left + 3)
    wait_until_idle(url)
    assert metric(url, "tandem_check_failures_total") == 0


def test_leaving_without_a_stream_frees_blocks_too(url: str) -> None:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 1900, "ignore_eos": True}
    left = aborted(url)
    with sent(url, "/v1/completions", body):
        eventually(lambda: metric(url, "tandem_num_requests_running"))
    eventually(lambda: aborted(url) == left + 1)
    wait_until_idle(url)


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="demo"):
        client.chat.completions.create(model="other", messages=TURNS)
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        client.completions.create(model="demo", prompt="Hello " * 4000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="at most 8"):
        client.chat.completions.create(model="demo", messages=TURNS, n=9)
    with pytest.raises(openai.BadRequestError, match="functions"):
        client.chat.completions.create(
            model="demo", messages=TURNS, functions=[{"name": "f", "parameters": {}}]
        )
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="demo", prompt="x" * 200_000)
    assert large.value.status_code == 413
