"""Modules of the Llama family that compute with our kernels.

They keep the names and calls of transformers' modules (`q_proj`, the attention interface ...), so
adapters and attention work as before. They use the plain formula if a gradient is wanted, else the
`RowKernels` of their device. `tandem.model.fuse` decides which modules they replace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tandem.model.linear import LinearGroup, Pack
from tandem.model.row_kernels import RowKernels

_SILU = type(ACT2FN["silu"])


@dataclass(frozen=True, slots=True)
class Family:
    """An attention class: its module's eager attention, and extra arguments for the attention
    interface, read from the module that is replaced."""

    eager: Callable[..., Any]
    extra: Callable[[Any], dict[str, Any]]


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records a function of these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class FusedRmsNorm(nn.Module):
    """RMS norm over the last dimension in one pass; `shifted` is Gemma's (1 + weight)."""

    def __init__(
        self, weight: nn.Parameter, eps: float, *, shifted: bool, rows: RowKernels
    ) -> None:
        super().__init__()
        self._rows = rows
        self.weight = weight
        self.eps = eps
        self.shifted = shifted

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        if not wants_gradient(x, self.weight):
            return self._rows.rms_norm(x, self.weight, self.eps, self.shifted)
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.shifted:
            return (normal * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normal.to(x.dtype)


class FusedMlp(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up in one product."""

    def __init__(self, original: Any, rows: RowKernels, pack: Pack) -> None:
        super().__init__()
        group = LinearGroup(original.gate_proj, original.up_proj, by=pack)
        self.gate_proj, self.up_proj = group.members
        self.down_proj = original.down_proj
        self.act_fn = original.act_fn
        self.gelu = not is_silu(original.act_fn)
        self._gated = rows.gelu_tanh_mul if self.gelu else rows.silu_mul

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if wants_gradient(gate, up):
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(self._gated(gate, up))


class FusedAttention(nn.Module):
    """Attention of the Llama family, with joined projections and one pass for the rotation.

    It calls transformers' attention interface with the arguments of the module that it replaces.
    """

    def __init__(self, original: Any, family: Family, rows: RowKernels, pack: Pack) -> None:
        super().__init__()
        self._rows = rows
        self.config = original.config
        self.layer_idx = original.layer_idx
        self.head_dim = original.head_dim
        self.num_key_value_groups = original.num_key_value_groups
        self.scaling = original.scaling
        self.attention_dropout = original.attention_dropout
        self.is_causal = original.is_causal
        self._extra = family.extra(original)
        self.window: int = self._extra.get("sliding_window") or 0
        self.softcap: float = self._extra.get("softcap") or 0.0
        self._eager = family.eager
        group = LinearGroup(original.q_proj, original.k_proj, original.v_proj, by=pack)
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
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [batch, T, hidden] -> the same shape, and the interface's weights.

        Before 5.24 transformers called its `cache` `past_key_values`.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(shape)
        key = self.k_proj(hidden_states).view(shape)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self._rotate(query, key, *position_embeddings)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
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

    def _rotate(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[batch, T, heads, dim] each -> rotated, [batch, heads, T, dim]."""
        if wants_gradient(query, key):
            return apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
        query, key = self._rows.rotary(query, key, cos, sin)
        return query.transpose(1, 2), key.transpose(1, 2)


def is_silu(act_fn: nn.Module) -> bool:
    """Whether this activation module is SiLU."""
    return isinstance(act_fn, _SILU | nn.SiLU)
