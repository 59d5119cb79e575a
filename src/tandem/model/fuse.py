"""Replaces modules of a loaded transformers model by equal, faster ones.

A module is replaced only if its class is known here and both give the same output for a random
input, in the model's own dtype. Every other module stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from tandem.model import kernels
from tandem.model.fused import Family, FusedAttention, FusedMlp, FusedRmsNorm, is_silu
from tandem.model.fused_layer import CppLayer, FusedLayer, LayerParts, WholeLayer
from tandem.model.linear import Pack, pack
from tandem.model.row_kernels import CppRows, RowKernels

_PLAIN_NORMS = (
    llama.LlamaRMSNorm,
    mistral.MistralRMSNorm,
    qwen2.Qwen2RMSNorm,
    qwen3.Qwen3RMSNorm,
)
_SHIFTED_NORMS = (gemma.GemmaRMSNorm, gemma2.Gemma2RMSNorm, gemma3.Gemma3RMSNorm)
_MLPS = (
    llama.LlamaMLP,
    mistral.MistralMLP,
    qwen2.Qwen2MLP,
    qwen3.Qwen3MLP,
    gemma.GemmaMLP,
    gemma2.Gemma2MLP,
    gemma3.Gemma3MLP,
)


_LAYERS = (
    llama.LlamaDecoderLayer,
    mistral.MistralDecoderLayer,
    qwen2.Qwen2DecoderLayer,
    qwen3.Qwen3DecoderLayer,
    gemma.GemmaDecoderLayer,
)


def _window(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


_ATTENTIONS: dict[type, Family] = {
    llama.LlamaAttention: Family(llama.eager_attention_forward, lambda module: {}),
    gemma.GemmaAttention: Family(gemma.eager_attention_forward, lambda module: {}),
    mistral.MistralAttention: Family(
        mistral.eager_attention_forward,
        lambda module: {"sliding_window": module.config.sliding_window},
    ),
    qwen2.Qwen2Attention: Family(qwen2.eager_attention_forward, _window),
    qwen3.Qwen3Attention: Family(qwen3.eager_attention_forward, _window),
    gemma2.Gemma2Attention: Family(
        gemma2.eager_attention_forward,
        lambda module: {**_window(module), "softcap": module.attn_logit_softcapping},
    ),
    gemma3.Gemma3Attention: Family(gemma3.eager_attention_forward, _window),
}
_GELU_TANH = type(ACT2FN["gelu_pytorch_tanh"])
# Relative to the largest output. float32 may sum in another order; 16-bit dtypes round once.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_PROBE_TOKENS = 5


@dataclass(slots=True)
class FuseReport:
    """Number of replaced modules by class name. `kept` names known modules whose check failed."""

    replaced: dict[str, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """What fused modules compute with on one kind of device."""

    rows: RowKernels
    whole: Callable[[LayerParts], WholeLayer]
    pack: Pack = pack


def cpp_kernels(by: Pack = pack) -> LayerKernels | None:
    """The C++ kernels, for CPUs, with projections packed `by`. None if they cannot be compiled."""
    return LayerKernels(CppRows(), CppLayer, by) if kernels.status().available else None


def fuse_modules(model: nn.Module, by: LayerKernels | None) -> FuseReport:
    """Replace known modules in place by modules that compute with `by`. Does nothing without.

    Call it before `pack_linears` and before adapters are attached. The joined projections are
    packed and frozen at once, so modules must not have trainable parameters. Each original is
    dropped as soon as it is replaced, so only one module's weights exist twice.
    """
    report = FuseReport()
    if by is None:
        return report
    # Norms first: attention reuses the fused norms, and a layer needs all its parts fused.
    for build in (_fused_norm, _fused_mlp, _fused_attention, _fused_layer):
        _replace_children(model, "", partial(build, by=by), report)
    return report


def _replace_children(
    parent: nn.Module, path: str, build: Callable[[Any], nn.Module | None], report: FuseReport
) -> None:
    """Replace what `build` knows below `parent`. Holds no list of all modules: it would keep the
    originals."""
    for name in [name for name, _ in parent.named_children()]:
        child: Any = parent.get_submodule(name)
        fused = build(child)
        if fused is None:
            _replace_children(child, f"{path}{name}.", build, report)
        elif not _agrees(child, fused):
            report.kept.append(f"{path}{name}")
        else:
            fused.train(child.training)
            setattr(parent, name, fused)
            kind = type(child).__name__
            report.replaced[kind] = report.replaced.get(kind, 0) + 1


def _fused_norm(module: Any, by: LayerKernels) -> nn.Module | None:
    if type(module) in _PLAIN_NORMS:
        return FusedRmsNorm(module.weight, module.variance_epsilon, shifted=False, rows=by.rows)
    if type(module) in _SHIFTED_NORMS:
        return FusedRmsNorm(module.weight, module.eps, shifted=True, rows=by.rows)
    return None


def _fused_mlp(module: Any, by: LayerKernels) -> nn.Module | None:
    if type(module) not in _MLPS or not _plain(module, "gate_proj", "up_proj"):
        return None
    if not (is_silu(module.act_fn) or isinstance(module.act_fn, _GELU_TANH)):
        return None
    return FusedMlp(module, by.rows, by.pack)


def _fused_attention(module: Any, by: LayerKernels) -> nn.Module | None:
    family = _ATTENTIONS.get(type(module))
    if family is None or not _plain(module, "q_proj", "k_proj", "v_proj"):
        return None
    return FusedAttention(module, family, by.rows, by.pack)


def _fused_layer(module: Any, by: LayerKernels) -> nn.Module | None:
    if type(module) not in _LAYERS:
        return None
    norms = (module.input_layernorm, module.post_attention_layernorm)
    parts = isinstance(module.self_attn, FusedAttention) and isinstance(module.mlp, FusedMlp)
    if not parts or not all(isinstance(norm, FusedRmsNorm) for norm in norms):
        return None
    return FusedLayer(module, by.whole)


def _plain(module: nn.Module, *names: str) -> bool:
    return all(type(module.get_submodule(name)) is nn.Linear for name in names)


def _agrees(original: Any, fused: nn.Module) -> bool:
    """Whether both give the same output for one random input, within the dtype's tolerance."""
    with torch.no_grad():
        if isinstance(fused, FusedLayer):
            expected, actual = _eager_outputs(original, fused, fused.self_attn)
        elif isinstance(fused, FusedAttention):
            expected, actual = (out[0] for out in _eager_outputs(original, fused, fused))
        else:
            is_norm = isinstance(fused, FusedRmsNorm)
            width = original.weight.shape[0] if is_norm else original.gate_proj.in_features
            probe = _random((1, _PROBE_TOKENS, width), next(original.parameters()))
            expected, actual = original(probe), fused(probe)
    error = (expected.float() - actual.float()).abs().max()
    return bool(error <= _TOLERANCE[expected.dtype] * expected.abs().max())


def _eager_outputs(original: Any, fused: nn.Module, attention: FusedAttention) -> tuple[Any, Any]:
    """Outputs of both modules through transformers' eager attention, whatever the model uses."""
    config, like = attention.config, attention.o_proj.weight
    hidden = _random((1, _PROBE_TOKENS, attention.q_proj.in_features), like)
    angles = _random(
        (1, _PROBE_TOKENS, attention.head_dim // 2), like.new_empty(0, dtype=torch.float32)
    )
    angles = torch.cat([angles, angles], dim=-1)
    positions = (angles.cos().to(like.dtype), angles.sin().to(like.dtype))
    chosen = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        return tuple(
            module(hidden, position_embeddings=positions, attention_mask=None)
            for module in (original, fused)
        )
    finally:
        config._attn_implementation = chosen


def _random(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Random numbers on the device and in the type of `like`."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like)
