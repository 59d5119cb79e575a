"""GGUF files of the studied models for llama.cpp, made once from their checkpoints.

They have no tokenizer, since jobs speak in token ids. Matrices are bfloat16 as in the checkpoint,
or q8_0; norms and biases are float32, as llama.cpp's converter writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import AutoModelForCausalLM

TYPES = {"bf16": Type.BF16, "q8_0": Type.Q8_0}
_ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def ensure_gguf(checkpoint: Path, kind: str, cache: Path) -> Path:
    """The file of a checkpoint with matrices of `kind`, in `cache`."""
    file = cache / f"{checkpoint.name}-{kind}.gguf"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".partial")
        write_gguf(checkpoint, TYPES[kind], aside)
        aside.rename(file)
    return file


def write_gguf(checkpoint: Path, kind: Type, file: Path) -> None:
    """Write the checkpoint of a Llama or Qwen 2 with matrices of `kind`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(file, config.model_type)
    _describe(writer, config)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[config.model_type], config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, weight in model.state_dict().items():
        if name in tied:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        values = _turned(name, weight, config).numpy()
        if values.ndim == 1:
            writer.add_tensor(found, values)
        else:
            writer.add_tensor(found, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _turned(name: str, weight: Tensor, config: Any) -> Tensor:
    """llama.cpp rotates neighbours of a Llama's heads, transformers halves."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((heads[part] for part in heads if part in name), 0)
    if config.model_type != "llama" or not count:
        return weight
    halves = weight.view(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
