"""GGUF files of tiny random models, written as llama.cpp's converter writes them.

Rows of 256 values, the longest block of any type. The tokenizer is bytes with one merge and three
tokens of a chat.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENS = [*bytes_to_unicode().values(), "he", *SPECIAL]
END_OF_TEXT, _, END_OF_TURN = range(len(TOKENS) - 3, len(TOKENS))
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 128
WINDOW = 9

_COMMON: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": END_OF_TEXT,
}
_CAPS = {"attn_logit_softcapping": 8.0, "final_logit_softcapping": 12.0}
_LAYERS = ["sliding_attention", "full_attention"]

_MAKERS: dict[str, Callable[[dict[str, Any]], PreTrainedModel]] = {
    "llama": lambda given: LlamaForCausalLM(LlamaConfig(**given)),
    "qwen2": lambda given: Qwen2ForCausalLM(Qwen2Config(**given)),
    "qwen3": lambda given: Qwen3ForCausalLM(Qwen3Config(**given, head_dim=32)),
    "phi3": lambda given: Phi3ForCausalLM(Phi3Config(**{"sliding_window": WINDOW} | given)),
    "gemma2": lambda given: Gemma2ForCausalLM(
        Gemma2Config(**given, **_CAPS, head_dim=256, sliding_window=WINDOW, layer_types=_LAYERS)
    ),
    "starcoder2": lambda given: Starcoder2ForCausalLM(
        Starcoder2Config(**given | {"rope_theta": 1e6})
    ),
    "gemma3": lambda given: Gemma3ForCausalLM(
        Gemma3TextConfig(**given, head_dim=256, sliding_window=WINDOW)
    ),
}
ARCHITECTURES = tuple(_MAKERS)
# Where a block of each type that nothing here quantises keeps its float16 scales, in bytes. Those
# of IQ1_M and NVFP4 are not in one place, or no float16: see `_random_blocks`.
UNWRITTEN: dict[Type, tuple[int, ...]] = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ1_S: (0,),
    Type.IQ1_M: (),
    Type.IQ2_XXS: (0,),
    Type.IQ2_XS: (0,),
    Type.IQ2_S: (0,),
    Type.IQ3_XXS: (0,),
    Type.IQ3_S: (0,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.NVFP4: (),
}
_SCALE = np.float16(0.0005)


def make(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """A random float32 model that decides clearly."""
    torch.manual_seed(0)
    model = _MAKERS[architecture](_COMMON | changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(0.15 * noise)
            else:
                weight.add_(0.1 * noise)
    return model.eval().requires_grad_(False)


def write(
    path: Path,
    model: PreTrainedModel,
    kind: Type = Type.F32,
    *,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    end: int = END_OF_TEXT,
    name: str = "Some model of somebody's",
) -> Path:
    """Write `model` with its matrices as `kind`; `fields` and `tensors` come on top."""
    config = model.config
    architecture = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    _describe(writer, architecture, config)
    fields = dict(fields or {})
    _add_tokenizer(writer, end, fields.pop("tokenizer.ggml.pre", "gpt-2"))
    for key, value in fields.items():
        adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        adders[type(value)](key, value)
    for name, weight in _tensors(architecture, model).items():
        _add(writer, name, weight, kind)
    for name, extra in (tensors or {}).items():
        writer.add_tensor(name, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if architecture == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    theta = config.rope_parameters
    writer.add_rope_freq_base(theta.get("full_attention", theta)["rope_theta"])
    writer.add_rope_dimension_count(head)
    if architecture in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(head)
    if config.to_dict().get("sliding_window"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_tokenizer(writer: gguf.GGUFWriter, end: int, kind: str) -> None:
    kinds = [gguf.TokenType.NORMAL] * len(TOKENS)
    kinds[-len(SPECIAL) :] = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(TOKENS)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(end)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_chat_template(TEMPLATE)


def _tensors(architecture: str, model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Names and layouts as llama.cpp has them."""
    config = model.config
    (found,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(found, config.num_hidden_layers)
    tensors = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, kind = name.rpartition(".")
        values = weight.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            pairs = values.reshape(heads, 2, -1, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and "norm" in name:
            values = values + 1
        tensors[f"{names.get_name(module)}.{kind}"] = values
    return tensors


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: Type) -> None:
    if values.ndim == 1 or kind is Type.F32:
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        return
    if kind in UNWRITTEN:
        packed = _random_blocks(values.shape, kind)
    else:
        packed = gguf.quantize(np.ascontiguousarray(values, np.float32), kind)
    writer.add_tensor(name, packed, raw_dtype=kind)


def _random_blocks(shape: tuple[int, ...], kind: Type) -> np.ndarray:
    """Any bytes are a block, but for the scales, which shall be small numbers."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(np.prod(shape)))
    blocks = random.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    for place in UNWRITTEN[kind]:
        blocks[..., place : place + 2] = np.frombuffer(_SCALE.tobytes(), np.uint8)
    if kind is Type.IQ1_M:  # the scale's nibbles are the upper ones of four numbers
        nibbles = (int(_SCALE.view(np.uint16)) >> np.array([0, 4, 8, 12])) & 15
        blocks[..., 49:56:2] = blocks[..., 49:56:2] & 15 | nibbles.astype(np.uint8) << 4
    if kind is Type.NVFP4:  # 1 is its smallest scale above 0
        blocks[..., :4] = 1
    return blocks.reshape(shape[0], -1)
