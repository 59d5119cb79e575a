"""A decoder layer of the Llama kind that runs as two kernel calls whenever that is exact.

It is exact when no gradient is wanted, the context is the CPU kernel's, and every projection is
the frozen one that was packed, wrapped by no adapter that acts now. Otherwise the parts are called
one by one, as transformers does. Both ways give the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tandem.model.attention.base import PagedContext
from tandem.model.attention.cpu import CpuBatch
from tandem.model.fused import FusedAttention, FusedMlp, FusedRmsNorm
from tandem.model.kernels.layer import (
    AttentionWeights,
    MlpWeights,
    NormWeights,
    Panels,
    attention_block,
    mlp_block,
)
from tandem.model.linear import AmxWeight, GroupMember, PackedLinear
from tandem.model.lora import LoraLinear

Projections = tuple[nn.Module | None, ...]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The kernels' view of a layer, valid while its projections are these very modules."""

    projections: Projections
    weights: tuple[AttentionWeights, MlpWeights] | None


class FusedLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the parts of the layer it replaces."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.self_attn: FusedAttention = original.self_attn
        self.mlp: FusedMlp = original.mlp
        self.input_layernorm: FusedRmsNorm = original.input_layernorm
        self.post_attention_layernorm: FusedRmsNorm = original.post_attention_layernorm
        self._blocks = _Blocks((), None)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        attention_context: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states [1, T, hidden] -> the same shape."""
        if (
            type(attention_context) is PagedContext
            and isinstance(attention_context.batch, CpuBatch)
            and attention_mask is None
            and past_key_values is None
            and not torch.is_grad_enabled()
            and (weights := self._weights()) is not None
        ):
            attention, mlp = weights
            cache = attention_context.layers[self.self_attn.layer_idx]
            tables = attention_context.batch.tables
            x = attention_block(
                hidden_states, attention, position_embeddings, (cache.keys, cache.values), tables
            )
            return mlp_block(x, mlp)
        mixed, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            attention_context=attention_context,
            **kwargs,
        )
        hidden_states = hidden_states + mixed
        normal = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.mlp(normal)

    def _weights(self) -> tuple[AttentionWeights, MlpWeights] | None:
        """What the kernels multiply by, or None where the parts must be called one by one."""
        attention, mlp = self.self_attn, self.mlp
        projections = tuple(
            map(
                _at_rest,
                (
                    attention.q_proj,
                    attention.k_proj,
                    attention.v_proj,
                    attention.o_proj,
                    mlp.gate_proj,
                    mlp.up_proj,
                    mlp.down_proj,
                ),
            )
        )
        # Modules compare by identity.
        if projections != self._blocks.projections:
            self._blocks = _Blocks(projections, self._find(projections))
        return self._blocks.weights

    def _find(self, projections: Projections) -> tuple[AttentionWeights, MlpWeights] | None:
        attention, mlp = self.self_attn, self.mlp
        qkv, gate_up = _joined(projections[:3]), _joined(projections[4:6])
        out, down = _panels(projections[3]), _panels(projections[6])
        if qkv is None or gate_up is None or out is None or down is None:
            return None
        norm, mlp_norm = _norm(self.input_layernorm), _norm(self.post_attention_layernorm)
        if not (_alike(attention.q_norm, norm) and _alike(attention.k_norm, norm)):
            return None
        return (
            AttentionWeights(
                norm=norm,
                qkv=qkv,
                out=out,
                query_norm=_weight(attention.q_norm),
                key_norm=_weight(attention.k_norm),
                scale=attention.scaling,
                window=attention.window,
                softcap=attention.softcap,
            ),
            MlpWeights(mlp_norm, gate_up, down, mlp.gelu),
        )


def _at_rest(projection: nn.Module) -> nn.Module | None:
    """The frozen layer behind a projection, if no adapter acts on it now."""
    if isinstance(projection, LoraLinear):
        return projection.base if projection.idle else None
    return projection


def _joined(members: Projections) -> Panels | None:
    """The weight of a whole group, if these are its members in order."""
    first = members[0]
    if not isinstance(first, GroupMember) or list(members) != list(first.group.members):
        return None
    return _panels(first.group.joined)


def _panels(layer: nn.Module | None) -> Panels | None:
    if isinstance(layer, PackedLinear) and isinstance(layer.weights, AmxWeight):
        return layer.weights.panels
    return None


def _norm(module: FusedRmsNorm) -> NormWeights:
    return NormWeights(module.weight.detach(), module.eps, module.shifted)


def _alike(module: nn.Module | None, norm: NormWeights) -> bool:
    """Whether the norm of single heads, if there is one, differs from `norm` in its weight only."""
    if not isinstance(module, FusedRmsNorm):
        return module is None
    return (module.eps, module.shifted) == (norm.eps, norm.shifted)


def _weight(module: nn.Module | None) -> Tensor | None:
    return module.weight.detach() if isinstance(module, FusedRmsNorm) else None
