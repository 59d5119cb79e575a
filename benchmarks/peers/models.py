"""Random-weight models with the shapes of real ones, saved once in a cache folder; a real one.

Speed does not depend on the values of the weights, so nothing is downloaded. The tokenizer is a
byte-level one without merges: the measurements speak in token ids, engines only want a file. The
real model is the chat model that comes as a package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from tandem.model.names import CHAT_NAME, locate

SHARED: dict[str, Any] = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def configs() -> dict[str, PreTrainedConfig]:
    """The shapes by name: Qwen2.5-0.5B and Llama 3 8B as published, and a Llama of 61 million
    parameters."""
    return {
        "qwen2.5-0.5b": Qwen2Config(
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            rope_theta=1e6,
            **SHARED,
        ),
        "llama-60m": LlamaConfig(
            vocab_size=32000,
            hidden_size=512,
            intermediate_size=1792,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=False,
            rope_theta=1e4,
            **SHARED,
        ),
        "llama-8b": LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=False,
            rope_theta=5e5,
            **SHARED,
        ),
    }


def shape_of(name: str) -> PreTrainedConfig:
    """Of a named model or of one in a directory."""
    folder = _existing(name)
    return AutoConfig.from_pretrained(folder) if folder else configs()[name]


def _existing(name: str) -> Path | None:
    """The directory of a model that is not made here."""
    if name == CHAT_NAME:
        return locate(name)
    return Path(name) if Path(name).is_dir() else None


def ensure_model(name: str, cache: Path, seed: int = 0) -> Path:
    """Folder of the model `name` under `cache`, made in bfloat16 if it is not there yet; a
    directory as it is."""
    if found := _existing(name):
        return found
    folder = cache / name
    if (folder / "model.safetensors").exists():
        return folder
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(configs()[name], dtype=torch.bfloat16)
    _byte_tokenizer().save_pretrained(folder)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return folder


def streamed_bytes(name: str) -> int:
    """Bytes of bfloat16 weights that one decode step reads: all but an untied input embedding."""
    layers, embedding = _parameters(name)
    return 2 * (layers + embedding)


def prefill_flops(name: str, tokens: int) -> float:
    """FLOPs of a prefill of `tokens`: the layers' matrices, causal attention, one row of the head.

    An attention row at position p multiplies 2 * p * heads * head_dim twice (scores and values).
    """
    config = shape_of(name)
    layers, embedding = _parameters(name)
    attention = 2.0 * int(config.num_hidden_layers * config.hidden_size) * tokens * (tokens + 1)
    return 2.0 * layers * tokens + attention + 2.0 * embedding


def _parameters(name: str) -> tuple[int, int]:
    """Numbers of the layers (norms and biases included), and of one embedding matrix."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_of(name), dtype=torch.bfloat16)
    embedding = int(model.get_input_embeddings().weight.numel())
    matrices = 1 if shape_of(name).tie_word_embeddings else 2
    total = sum(tensor.numel() for tensor in model.parameters())
    return total - matrices * embedding, embedding


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
