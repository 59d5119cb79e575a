"""The tokenizer's face: chat templates, special tokens, bytes of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from serving import DEMO_MODEL, demo_tokenizer
from tandem.core.errors import InvalidRequest, UnsupportedModel
from tandem.services.answering.tokenizer import Tokenizer


def make(
    folder: Path,
    *,
    template: str | None = None,
    sentencepiece: bool = False,
    special: tuple[str, ...] = (),
) -> Tokenizer:
    """A tiny tokenizer directory: single bytes, or SentencePiece-like with byte fallback; `special`
    tokens are not named in its configuration."""
    folder.mkdir()
    if sentencepiece:
        words = ["<unk>", "<s>", "▁Hello", "▁", "o", *(f"<0x{byte:02X}>" for byte in range(256))]
        model = models.BPE({word: place for place, word in enumerate(words)}, [], unk_token="<unk>")
        backend = Backend(model)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        words = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(models.BPE({word: place for place, word in enumerate(words)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def test_chat_is_rendered_with_the_models_own_template() -> None:
    tokenizer = demo_tokenizer()
    tokens = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(tokens) == "user\nHi\nassistant\n"
    opened = tokenizer.encode_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert tokens[: len(opened)] == opened and len(opened) < len(tokens)


def test_a_model_without_template_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "bytes")
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        tokenizer.encode_chat([{"role": "user", "content": "Hi"}])


def test_a_refusal_of_the_template_reaches_the_caller(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "bytes", template="{{ raise_exception('no system role') }}")
    with pytest.raises(InvalidRequest, match="no system role") as caught:
        tokenizer.encode_chat([{"role": "system", "content": "Hi"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_a_missing_tokenizer_is_named(tmp_path: Path, kind: str) -> None:
    """transformers makes an empty one for some, and blames a package for others."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer \(tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(UnsupportedModel, match="cannot load a tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_tokens_know_their_bytes_also_within_a_character(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "bytes")
    tokens = tokenizer.encode("a €")
    assert b"".join(tokenizer.token_bytes(token) for token in tokens) == "a €".encode()
    assert tokenizer.token_text(tokens[0]) == "a"
    assert tokenizer.token_text(tokens[2]) == r"bytes:\xe2"


def test_sentencepiece_tokens_know_their_bytes(tmp_path: Path) -> None:
    tokenizer = make(tmp_path / "pieces", sentencepiece=True)
    assert tokenizer.token_text(2) == " Hello"
    assert tokenizer.token_bytes(5 + 0xE2) == b"\xe2"


def test_special_and_padding_ids_are_safe() -> None:
    tokenizer = demo_tokenizer()
    stop = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert len(stop) == 1
    assert tokenizer.token_text(stop[0]) == "<|im_end|>"
    assert tokenizer.decode(stop) == ""
    assert tokenizer.token_bytes(tokenizer.size + 5) == b""
    assert tokenizer.decode([tokenizer.size + 5]) == ""


def test_special_tokens_that_only_the_vocabulary_names_are_not_shown(tmp_path: Path) -> None:
    """Only those by which answers are read."""
    names = ("<|turn|>", "[TOOL_CALLS]")
    tokenizer = make(tmp_path / "bytes", template="{% if tools %}{% endif %}", special=names)
    turn, calls = (tokenizer.special_token(name) for name in names)
    assert turn is not None and calls is not None
    tokens = [turn, *tokenizer.encode("Hello"), calls, turn]
    assert tokenizer.markers.decode(tokens) == "Hello[TOOL_CALLS]"
    assert tokenizer.decode(tokens) == "Hello"
    assert tokenizer.token_text(turn) == "<|turn|>"


def test_loading_takes_a_path_or_a_string() -> None:
    assert Tokenizer.load(str(DEMO_MODEL)).size == demo_tokenizer().size
