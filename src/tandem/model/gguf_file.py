"""A model in one GGUF file: whether it can be served, and its content as a checkpoint.

transformers' loader reads the weights, the configuration and the tokenizer. What it would silently
leave out (rotary scaling, soft caps, tensors of other architectures) is added or refused here,
before a weight is read. Knows no cache. Invariant: a checkpoint by `write_checkpoint` has every
value of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GgufConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from tandem.core.errors import UnsupportedModel
from tandem.model.capability import refuse

Progress = Callable[[str, float], None]

# Keys of an architecture that the loader leaves out, and transformers' names for them.
_TAKEN_OVER = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# How chat templates end a turn. A file's end-of-text token may be another one.
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>", "<turn|>")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Layers of the models (27B) whose attention is scaled by another number than the others' is.
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
# Tokenizers (`tokenizer.ggml.pre`) that put their first token before a text unless the file says
# otherwise, as llama.cpp's loader has it.
_WITH_BOS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
)  # fmt: skip
_ROTARY_FACTORS = "rope_freqs.weight"
# Llama 3's rotary scaling. The file has only its factors per frequency; only `factor` varies.
_LLAMA3_ROTARY = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class Contents:
    """Content of a file, without its weights."""

    config: PreTrainedConfig
    dtype: torch.dtype  # float32 if the file has nothing else, otherwise bfloat16
    values: int  # number of values in all tensors
    begins: bool  # whether texts begin with the tokenizer's first token, though it does not say so
    end_tokens: tuple[int, ...]  # tokens that end an answer


def read_contents(file: Path) -> Contents:
    """Read everything but the weights. Raises `UnsupportedModel` if the file cannot be served."""
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    # the reader checks nothing: any error of numpy or Python is possible
    except Exception as error:
        raise UnsupportedModel(f"{file} is damaged or not complete: {_line(error)}") from error
    architecture = str(fields.get("general.architecture", ""))
    _refuse_kind(file, architecture, fields)
    _refuse_types(file, reader.tensors)
    config = _configuration(file, architecture, fields)
    rotary = {each.name: each.data for each in reader.tensors if each.name == _ROTARY_FACTORS}
    if rotary:
        _scale_rotary(file, config, rotary[_ROTARY_FACTORS].reshape(-1))
    values = sum(int(each.n_elements) for each in reader.tensors if each.name not in rotary)
    _refuse_other_values(file, config, values)
    only_float32 = {each.tensor_type for each in reader.tensors} == {GGMLQuantizationType.F32}
    dtype = torch.float32 if only_float32 else torch.bfloat16
    return Contents(config, dtype, values, _begins(fields), _end_tokens(fields))


def write_checkpoint(file: Path, contents: Contents, folder: Path, progress: Progress) -> None:
    """Write weights, configurations, tokenizer and chat template to the empty `folder`.

    Raises `UnsupportedModel` for what transformers refuses, `OSError` if writing fails.
    """
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), gguf_file=_alone(file))
        progress(f"unpacking {file.name}, once for this machine", 0.3)
        model, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            gguf_file=_alone(file),
            config=contents.config,
            dtype=contents.dtype,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except Exception as error:  # transformers may raise anything
        raise UnsupportedModel(f"transformers cannot read {file}: {_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(f"{file} lacks weights: {missing[0]}, ...")
    if contents.begins:
        tokenizer.add_bos_token = True
    progress(f"writing the weights of {file.name}", 0.8)
    model.generation_config = GenerationConfig(eos_token_id=list(contents.end_tokens) or None)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # safetensors has its own error for a full disk
        raise OSError(_line(error)) from error


def _refuse_kind(file: Path, architecture: str, fields: dict[str, Any]) -> None:
    kind = fields.get("general.type", "model")
    if not architecture or kind != "model" or architecture in ("clip", "mmproj"):
        raise UnsupportedModel(f"{file} holds no language model (general.type {kind})")
    if int(fields.get("split.count", 0)) > 1:
        raise UnsupportedModel(f"{file} is a part of a model; join the parts into one file first")
    if "tokenizer.ggml.tokens" not in fields:
        raise UnsupportedModel(f"{file} has no tokenizer")
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModel(
            f"{file} has {scaling} rotary scaling, which transformers does not read from GGUF"
        )


def _refuse_types(file: Path, tensors: Sequence[Any]) -> None:
    for kind in {each.tensor_type for each in tensors}:
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        try:
            gguf.dequantize(block, kind)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{file} has weights of type {kind.name}, which cannot be unpacked"
            ) from error


def _configuration(file: Path, architecture: str, fields: dict[str, Any]) -> PreTrainedConfig:
    """The model's configuration, including the keys that transformers' loader leaves out."""
    try:
        with TemporaryDirectory() as empty:
            config = AutoConfig.from_pretrained(empty, gguf_file=_alone(file))
    except Exception as error:  # unknown architecture, or a missing key
        raise UnsupportedModel(
            f"transformers cannot read {file} (architecture {architecture}): {_line(error)}"
        ) from error
    if architecture == "llama":  # also where transformers takes it for another one by its name
        config = LlamaConfig.from_dict(config.to_dict() | {"model_type": "llama"})
    refuse(file.name, config)
    known = config.to_dict()
    for key, name in _TAKEN_OVER.items():
        value = fields.get(f"{architecture}.{key}")
        if value is not None and name in known:
            setattr(config, name, value)
    rotary = known.get("rope_parameters") or {}
    if "rope_theta" in rotary and (base := fields.get(f"{architecture}.rope.freq_base")):
        config.rope_parameters = rotary | {"rope_theta": float(base)}
    if "query_pre_attn_scalar" in known:  # the file does not say it; as llama.cpp's loader does
        per_head = config.hidden_size // config.num_attention_heads
        large = config.num_hidden_layers == _LARGE_GEMMA.get(architecture)
        config.query_pre_attn_scalar = per_head if large else config.head_dim
    if "sliding_window" in known and (architecture == "llama" or not config.sliding_window):
        config.sliding_window = None
    # `general.name` would be taken for the file's origin
    config.__dict__.pop("_model_name_or_path", None)
    return config


def _scale_rotary(file: Path, config: PreTrainedConfig, factors: np.ndarray) -> None:
    """Set Llama 3's rotary scaling. Raises `UnsupportedModel` if the factors are not Llama 3's."""
    plain = dict(config.rope_parameters)
    config.rope_parameters = plain | _LLAMA3_ROTARY | {"factor": round(float(factors.max()), 3)}
    head = config.head_dim
    base = plain["rope_theta"] ** -(np.arange(0, head, 2, dtype=np.float64) / head)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].numpy()
    if factors.shape != base.shape or not np.allclose(base / scaled, factors, rtol=1e-3):
        raise UnsupportedModel(
            f"{file} has rotary factors ({_ROTARY_FACTORS}) that are not Llama 3's, and "
            "transformers does not read them from GGUF"
        )


def _refuse_other_values(file: Path, config: PreTrainedConfig, values: int) -> None:
    """Raise `UnsupportedModel` unless every value has its place in the model. The loader silently
    skips tensors that it does not know."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # a configuration that makes no sense
        raise UnsupportedModel(f"{file} describes no model: {_line(error)}") from error
    expected = sum(weight.numel() for weight in model.parameters())
    if values != expected:
        raise UnsupportedModel(
            f"{file} has {values:,} values, but transformers' {type(model).__name__} of this "
            f"configuration has {expected:,}: it would not be the same model"
        )


def _begins(fields: dict[str, Any]) -> bool:
    named = fields.get("tokenizer.ggml.pre") in _WITH_BOS
    return named and fields.get("tokenizer.ggml.add_bos_token") is None


def _end_tokens(fields: dict[str, Any]) -> tuple[int, ...]:
    named = [fields.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    template = str(fields.get("tokenizer.chat_template", ""))
    tokens = fields["tokenizer.ggml.tokens"]
    turns = [tokens.index(text) for text in _ENDS_OF_TURN if text in template and text in tokens]
    return tuple(dict.fromkeys(int(token) for token in [*named, *turns] if token is not None))


def _alone(file: Path) -> str:
    """The file by a path from the root, for use with an empty folder.

    In the file's own folder, transformers would prefer a tokenizer or an adapter that lies beside
    it; and by its name alone, a file of that name in the working directory.
    """
    return str(file.resolve())


def _line(error: Exception) -> str:
    """First line of an error's message."""
    return re.split(r"[\r\n]", str(error).strip(), maxsplit=1)[0] or type(error).__name__
