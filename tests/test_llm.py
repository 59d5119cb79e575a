"""Use without a server, on the bundled model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.errors import InvalidRequest
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.llm import LLM


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", threads=1, memory_bytes=4 << 20)


def test_text_and_token_prompts_give_the_same(llm):
    text = "Tell me a joke"
    tokens = llm.tokenizer.encode(text)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    first, second = llm.generate([text, tokens], sampling)
    assert first.choices[0].tokens == second.choices[0].tokens
    assert first.choices[0].finish_reason is FinishReason.LENGTH
    assert first.choices[0].text == llm.tokenizer.decode(first.choices[0].tokens)


def test_seeds_choices_and_scores(llm):
    sampling = SamplingParams(max_tokens=6, seed=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    once, again = (llm.generate(["Hello there"], sampling, n=3)[0] for _ in range(2))
    assert [c.tokens for c in once.choices] == [c.tokens for c in again.choices]
    assert len({tuple(c.tokens) for c in once.choices}) > 1
    assert len(once.prompt_logprobs) == len(once.prompt) - 1
    assert all(len(logprob.top) == 2 for logprob in once.choices[0].logprobs)


def test_chat_answers_and_stops(llm):
    assert "Paris" in llm.chat([{"role": "user", "content": "What is the capital of France?"}])


def test_a_small_cache_bounds_the_context(llm):
    assert llm.info.max_model_len == llm.info.num_blocks * llm.info.block_size < 2048
    whole = SamplingParams(max_tokens=10_000, temperature=0.0, ignore_eos=True)
    output = llm.generate(["Hello"], whole)[0]
    assert len(output.prompt) + len(output.choices[0].tokens) == llm.info.max_model_len


@pytest.mark.parametrize("change", [{"temperature": 1e-50}, {"temperature": 1e-4}, {"min_p": 1.0}])
def test_extreme_sampling_stays_finite(llm, change):
    sampling = replace(SamplingParams(max_tokens=4, ignore_eos=True), **change)
    assert len(llm.generate(["Hello"], sampling)[0].choices[0].tokens) == 4


def test_what_does_not_fit_is_refused_and_nothing_stays(llm):
    with pytest.raises(InvalidRequest, match="context"):
        llm.generate(["fine", [5] * 5000])
    with pytest.raises(InvalidRequest, match="at least one choice"):
        llm.generate(["fine"], n=0)
    with pytest.raises(InvalidRequest, match="unknown setting"):
        LLM("demo", no_such_setting=1)
    assert len(llm.generate(["fine"], SamplingParams(max_tokens=1))) == 1
