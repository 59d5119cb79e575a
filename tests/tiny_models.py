"""Tiny random models that decide clearly, built once per process and saved where asked.

Weights are large, so that nearly every next token is well ahead of the runner-up and greedy
answers can be compared token by token.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 160
WINDOW = 9
MAX_LENGTH = 128
CLEAR_GAP = 1e-3
PLAIN = ("llama", "gemma2")
"""What is tested without compiled kernels, too."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_COMMON | changes))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_COMMON))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=24))


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_COMMON, head_dim=16, sliding_window=WINDOW))


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(
        **_COMMON,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
        attn_logit_softcapping=8.0,
        final_logit_softcapping=12.0,
    )
    return Gemma2ForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    config = Gemma3TextConfig(
        **_COMMON,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        layer_types=_SLIDING,
    )
    return Gemma3ForCausalLM(config)


def _phi3() -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**_COMMON))


def _olmo2() -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**_COMMON))


def _granite() -> PreTrainedModel:
    config = GraniteConfig(
        **_COMMON,
        logits_scaling=2.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        embedding_multiplier=3.0,
    )
    return GraniteForCausalLM(config)


ARCHITECTURES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
}


def with_kernels(
    names: Sequence[str], *, quick: Sequence[str] | None = None, plain: Sequence[str] = PLAIN
) -> list[Any]:
    """(name, kernels) for tests: families with compiled kernels (`quick`, or each) and without
    (`plain`). All others are `make test-full`'s."""
    in_short = {"auto": names if quick is None else quick, "off": plain}
    return [
        pytest.param(name, kernels, marks=[] if name in short else [pytest.mark.full])
        for name in names
        for kernels, short in in_short.items()
    ]


def make_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model in eager mode; `changes` go to the Llama configuration only."""
    torch.manual_seed(seed)
    model = _llama(**changes) if changes else ARCHITECTURES[name]()
    _enlarge(model, seed)
    model.set_attn_implementation("eager")
    return model.eval().requires_grad_(False)


def _enlarge(model: PreTrainedModel, seed: int) -> None:
    """Matrices of standard deviation 0.4; norms and biases spread, so that none is the identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                weight.copy_(0.4 * noise)
            else:
                weight.add_(0.1 * noise)


def save_model(folder: Path, name: str, seed: int = 0) -> Path:
    """Save `make_model(name, seed)` under `folder` and return its directory."""
    target = folder / f"{name}-{seed}"
    if not target.exists():
        make_model(name, seed).save_pretrained(target)
    return target


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab] of the model's own eager forward without any cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def clear_rows(logits: torch.Tensor) -> torch.Tensor:
    """Rows whose two best logits differ by more than `CLEAR_GAP`; bool [rows]."""
    best = logits.topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]) > CLEAR_GAP


def save_adapter(folder: Path, name: str, seed: int, **lora: Any) -> Path:
    """A PEFT directory of a random LoRA (both halves non-zero) for `make_model(name)`."""
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | lora
    with _quiet_peft():
        adapted = get_peft_model(make_model(name), LoraConfig(**settings, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in adapted.named_parameters():
            if "lora_" in key:
                weight.copy_(0.25 * torch.randn(weight.shape, generator=generator))
    target = folder / f"{name}-adapter-{seed}"
    adapted.save_pretrained(target)
    return target


def make_adapted(name: str, path: Path) -> Any:
    """PEFT's own model of `make_model(name)` with the adapter at `path`."""
    from peft import PeftModel

    with _quiet_peft():
        return PeftModel.from_pretrained(make_model(name), path).eval()


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """PEFT still reads an attribute that transformers has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
