"""Replaces modules of a loaded transformers model by equal, faster ones.

A module is replaced only when its class is known here and a random input gives the same output
before and after, in the model's own dtype; every other module stays. The fused modules keep the
names and the calls of the originals (`q_proj`, the attention interface ...), so adapters and
attention work as before, and fall back to the plain formula where a gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from tandem.model import kernels
from tandem.model.linear import LinearGroup

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


@dataclass(frozen=True, slots=True)
class _Family:
    """Of one attention class: its module's eager attention, and what it adds to the call of the
    attention interface, read from the module that is replaced."""

    eager: Callable[..., Any]
    extra: Callable[[Any], dict[str, Any]]


def _window(module: Any) -> dict[str, Any]:
    return {"sliding_window": module.sliding_window}


_ATTENTIONS: dict[type, _Family] = {
    llama.LlamaAttention: _Family(llama.eager_attention_forward, lambda module: {}),
    gemma.GemmaAttention: _Family(gemma.eager_attention_forward, lambda module: {}),
    mistral.MistralAttention: _Family(
        mistral.eager_attention_forward,
        lambda module: {"sliding_window": module.config.sliding_window},
    ),
    qwen2.Qwen2Attention: _Family(qwen2.eager_attention_forward, _window),
    qwen3.Qwen3Attention: _Family(qwen3.eager_attention_forward, _window),
    gemma2.Gemma2Attention: _Family(
        gemma2.eager_attention_forward,
        lambda module: {**_window(module), "softcap": module.attn_logit_softcapping},
    ),
    gemma3.Gemma3Attention: _Family(gemma3.eager_attention_forward, _window),
}
_SILU = type(ACT2FN["silu"])
_GELU_TANH = type(ACT2FN["gelu_pytorch_tanh"])
# Relative to the largest output: float32 sums in another order; one rounding of a 16-bit dtype.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_PROBE_TOKENS = 5


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records a function of these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class FusedRmsNorm(nn.Module):
    """RMS norm over the last dimension in one pass; `shifted` is Gemma's (1 + weight)."""

    def __init__(self, weight: nn.Parameter, eps: float, shifted: bool) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.shifted = shifted

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        if not wants_gradient(x, self.weight):
            return kernels.rms_norm(x, self.weight, self.eps, self.shifted)
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.shifted:
            return (normal * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normal.to(x.dtype)


class FusedMlp(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up in one product."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        group = LinearGroup(original.gate_proj, original.up_proj)
        self.gate_proj, self.up_proj = group.members
        self.down_proj = original.down_proj
        self.act_fn = original.act_fn
        self._gated = kernels.silu_mul if _is_silu(original.act_fn) else kernels.gelu_tanh_mul

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if wants_gradient(gate, up):
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(self._gated(gate, up))


class FusedAttention(nn.Module):
    """Attention of the Llama family: joined projections, one pass for the rotation.

    It calls transformers' attention interface with the arguments of the module it replaces.
    """

    def __init__(self, original: Any, family: _Family) -> None:
        super().__init__()
        self.config = original.config
        self.layer_idx = original.layer_idx
        self.head_dim = original.head_dim
        self.num_key_value_groups = original.num_key_value_groups
        self.scaling = original.scaling
        self.attention_dropout = original.attention_dropout
        self.is_causal = original.is_causal
        self._extra = family.extra(original)
        self._eager = family.eager
        group = LinearGroup(original.q_proj, original.k_proj, original.v_proj)
        self.q_proj, self.k_proj, self.v_proj = group.members
        self.o_proj = original.o_proj
        names = dict(original.named_children())
        self.q_norm: nn.Module | None = names.get("q_norm")
        self.k_norm: nn.Module | None = names.get("k_norm")

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [batch, T, hidden] -> the same shape, and the interface's weights."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = _rotate(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self._eager
        )
        mixed, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **self._extra,
            **kwargs,
        )
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1)), weights


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[batch, T, heads, dim] each -> rotated, [batch, heads, T, dim]."""
    if wants_gradient(query, key):
        return llama.apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    query, key = kernels.rotary(query, key, cos, sin)
    return query.transpose(1, 2), key.transpose(1, 2)


def _is_silu(act_fn: nn.Module) -> bool:
    return isinstance(act_fn, _SILU | nn.SiLU)


@dataclass(slots=True)
class FuseReport:
    """Modules replaced, by class name; `kept` names known modules whose check failed."""

    replaced: dict[str, int] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)


def fuse_modules(model: nn.Module) -> FuseReport:
    """Replaces what it knows, in place; nothing off the CPU or without the kernels.

    Call it before `pack_linears` and before adapters are attached. The joined projections are
    packed and frozen at once; modules with trainable parameters are not expected here.
    """
    report = FuseReport()
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if not on_cpu or not kernels.status().available:
        return report
    # Norms first: an attention takes over the fused ones.
    for build in (_fused_norm, _fused_mlp, _fused_attention):
        for path, parent in list(model.named_modules()):
            for name, child in list(parent.named_children()):
                fused = build(child)
                if fused is None:
                    continue
                if not _agrees(child, fused):
                    report.kept.append(f"{path}.{name}".lstrip("."))
                    continue
                fused.train(child.training)
                setattr(parent, name, fused)
                kind = type(child).__name__
                report.replaced[kind] = report.replaced.get(kind, 0) + 1
    return report


def _fused_norm(module: Any) -> nn.Module | None:
    if type(module) in _PLAIN_NORMS:
        return FusedRmsNorm(module.weight, module.variance_epsilon, shifted=False)
    if type(module) in _SHIFTED_NORMS:
        return FusedRmsNorm(module.weight, module.eps, shifted=True)
    return None


def _fused_mlp(module: Any) -> nn.Module | None:
    if type(module) not in _MLPS or not _plain(module, "gate_proj", "up_proj"):
        return None
    if not (_is_silu(module.act_fn) or isinstance(module.act_fn, _GELU_TANH)):
        return None
    return FusedMlp(module)


def _fused_attention(module: Any) -> nn.Module | None:
    family = _ATTENTIONS.get(type(module))
    if family is None or not _plain(module, "q_proj", "k_proj", "v_proj"):
        return None
    return FusedAttention(module, family)


def _plain(module: nn.Module, *names: str) -> bool:
    return all(type(module.get_submodule(name)) is nn.Linear for name in names)


def _agrees(original: Any, fused: nn.Module) -> bool:
    """Whether both give the same output for one random input, to the dtype's tolerance."""
    with torch.no_grad():
        if isinstance(fused, FusedAttention):
            expected, actual = _attention_outputs(original, fused)
        else:
            is_norm = isinstance(fused, FusedRmsNorm)
            width = original.weight.shape[0] if is_norm else original.gate_proj.in_features
            probe = _random((1, _PROBE_TOKENS, width), next(original.parameters()).dtype)
            expected, actual = original(probe), fused(probe)
    error = (expected.float() - actual.float()).abs().max()
    return bool(error <= _TOLERANCE[expected.dtype] * expected.abs().max())


def _attention_outputs(original: Any, fused: FusedAttention) -> tuple[Tensor, Tensor]:
    """Both modules through transformers' eager attention, whatever the model is set to use."""
    dtype = original.o_proj.weight.dtype
    hidden = _random((1, _PROBE_TOKENS, original.q_proj.in_features), dtype)
    angles = _random((1, _PROBE_TOKENS, fused.head_dim // 2), torch.float32)
    angles = torch.cat([angles, angles], dim=-1)
    positions = (angles.cos().to(dtype), angles.sin().to(dtype))
    chosen = original.config._attn_implementation
    original.config._attn_implementation = "eager"
    try:
        expected = original(hidden, position_embeddings=positions, attention_mask=None)[0]
        return expected, fused(hidden, position_embeddings=positions)[0]
    finally:
        original.config._attn_implementation = chosen


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
