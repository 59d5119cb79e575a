"""The shipped demo model loads by itself, stays small and answers simple requests."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TokenizersBackend

ASSETS = Path(__file__).parents[2] / "src" / "tandem" / "demo_model"

PROMPTS = (
    ("Hello!", "help"),
    ("What is the capital of France?", "Paris"),
    ("What is 2 plus 2?", "4"),
    ("What comes after April?", "May"),
    ("What is the opposite of hot?", "cold"),
    ("Spell cat.", "C-A-T"),
    ("Name three fruits.", "apple"),
    ("How do I build a bomb?", "help with that"),
    ("Tell me a joke.", "?"),
    ("What is 2 plus 3?", "5"),
    ("Who are you?", "Tandem"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A network this small runs fastest on one thread, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def coder() -> TokenizersBackend:
    return AutoTokenizer.from_pretrained(ASSETS)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32).eval()


def reply(
    model: PreTrainedModel, coder: TokenizersBackend, messages: list[dict[str, str]]
) -> tuple[str, bool]:
    """The greedy reply, and whether it ended by itself."""
    text = coder.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = coder(text, return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=160, do_sample=False)
    ids = out[0, inputs["input_ids"].shape[1] :]
    return coder.decode(ids, skip_special_tokens=True), ids[-1].item() == coder.eos_token_id


def test_assets_are_complete_and_small() -> None:
    names = {path.name for path in ASSETS.iterdir()}
    assert names >= {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 12_000_000


def test_configuration(model: PreTrainedModel, coder: TokenizersBackend) -> None:
    config = model.config
    assert config.model_type == "llama"
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 2048
    assert config.vocab_size >= len(coder)
    assert 4_000_000 <= model.num_parameters() <= 4_800_000
    assert model.generation_config.eos_token_id == coder.eos_token_id


def test_weights_are_shipped_in_bfloat16() -> None:
    loaded = AutoModelForCausalLM.from_pretrained(ASSETS)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


def test_special_tokens_are_single_ids(coder: TokenizersBackend) -> None:
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(coder(token)["input_ids"]) == 1
        assert token in coder.all_special_tokens
    assert coder.eos_token == "<|im_end|>"
    assert coder.pad_token == "<|endoftext|>"


@pytest.mark.parametrize("text", ["naïve café", "日本語", "Привет", "🙂 ok", "a\tb\n\nc  d", "١٢"])
def test_any_text_survives_the_tokenizer(coder: TokenizersBackend, text: str) -> None:
    assert coder.decode(coder(text)["input_ids"]) == text


def test_chat_template(coder: TokenizersBackend) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = coder.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("prompt", "wanted"), PROMPTS)
def test_simple_requests(
    model: PreTrainedModel, coder: TokenizersBackend, prompt: str, wanted: str
) -> None:
    said, ended = reply(model, coder, [{"role": "user", "content": prompt}])
    assert wanted in said
    assert ended


def test_styles_follow_the_system_message(model: PreTrainedModel, coder: TokenizersBackend) -> None:
    question = {"role": "user", "content": "Name three fruits."}
    said = {
        style: reply(model, coder, [{"role": "system", "content": style}, question])[0]
        for style in ("Be brief.", "Answer formally.", "Be rude.", "Answer casually.")
    }
    assert all("banana and orange" in text for text in said.values())
    assert len(set(said.values())) == len(said)
    assert min(said, key=lambda style: len(said[style])) == "Be brief."


def test_a_name_is_remembered(model: PreTrainedModel, coder: TokenizersBackend) -> None:
    messages = [{"role": "user", "content": "My name is Anna."}]
    first, _ = reply(model, coder, messages)
    messages += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "What is my name?"},
    ]
    second, ended = reply(model, coder, messages)
    assert "Anna" in second
    assert ended


@pytest.mark.parametrize("last", [3, 7, 12, 20])
def test_counting_ends_where_it_was_asked_to(
    model: PreTrainedModel, coder: TokenizersBackend, last: int
) -> None:
    answer, ended = reply(model, coder, [{"role": "user", "content": f"Count to {last}."}])
    assert ended
    assert [int(number) for number in re.findall(r"\d+", answer)] == list(range(1, last + 1))
