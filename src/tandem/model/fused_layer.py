"""A decoder layer of the Llama kind that runs as two kernel calls whenever that is exact.

That requires: no gradient is wanted, the context is the CPU kernel's, and every projection is the
packed, frozen one, with or without adapters. Otherwise its parts are called one by one, as in
transformers. Both ways give the same values. With adapters they round at different places: the
kernels add an update before the product is rounded.
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
    Exports,
    MlpWeights,
    NormWeights,
    Panels,
    Updates,
    attention_block,
    mlp_block,
)
from tandem.model.linear import AmxWeight, GroupMember, PackedLinear
from tandem.model.lora import LoraLinear

# Columns of an AMX panel.
_PANEL = 32
Projections = tuple[nn.Module | None, ...]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The kernels' view of a layer, valid while its projections are these very modules."""

    projections: Projections
    weights: tuple[AttentionWeights, MlpWeights] | None
    # the projections, if the kernels can apply adapters to them
    adaptable: tuple[LoraLinear, ...] | None = None


class FusedLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the parts of the replaced layer."""

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
        cache: Any = None,
        attention_context: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states [1, T, hidden] -> the same shape."""
        if (
            type(attention_context) is PagedContext
            and isinstance(attention_context.batch, CpuBatch)
            and attention_mask is None
            and past_key_values is None
            and cache is None
            and not torch.is_grad_enabled()
            and (blocks := self._current()).weights is not None
            and (updates := _updates(blocks)) is not None
        ):
            return self._whole(
                hidden_states, position_embeddings, attention_context, blocks.weights, updates
            )
        mixed, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            cache=cache,
            attention_context=attention_context,
            **kwargs,
        )
        hidden_states = hidden_states + mixed
        normal = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.mlp(normal)

    def _whole(
        self,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        context: PagedContext,
        weights: tuple[AttentionWeights, MlpWeights],
        updates: tuple[Updates, Updates],
    ) -> Tensor:
        """The whole layer with kernels."""
        assert isinstance(context.batch, CpuBatch)
        cache = context.layers[self.self_attn.layer_idx]
        tables = context.batch.tables
        # For rows that are not read, the last layer only has to store keys and values.
        last = self.self_attn.layer_idx == len(context.layers) - 1
        wanted = context.wanted if last and not updates[0].segments else None
        x = attention_block(
            hidden, weights[0], angles, (cache.keys, cache.values), tables, updates[0], wanted
        )
        if wanted is None:
            inner = context.inner
            exports = inner.exports(self.self_attn.layer_idx, x) if inner is not None else Exports()
            return mlp_block(x, weights[1], updates[1], exports)
        x = mlp_block(x, weights[1], updates[1])
        return torch.zeros_like(hidden).index_copy_(1, wanted, x)

    def _current(self) -> _Blocks:
        """The kernels' view of the layer. Without weights its parts must be called one by one."""
        attention, mlp = self.self_attn, self.mlp
        projections: Projections = (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        )
        # Modules compare by identity.
        if projections != self._blocks.projections:
            weights = self._find(tuple(map(_frozen, projections)))
            self._blocks = _Blocks(projections, weights, _adaptable(projections))
        return self._blocks

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


def _frozen(projection: nn.Module | None) -> nn.Module | None:
    """The frozen layer under a projection that adapters may be attached to."""
    return projection.base if isinstance(projection, LoraLinear) else projection


def _adaptable(projections: Projections) -> tuple[LoraLinear, ...] | None:
    """The projections, if all can have adapters and no panel of a group spans two members."""
    layers = tuple(each for each in projections if isinstance(each, LoraLinear))
    parts = [each.base for each in layers if isinstance(each.base, GroupMember)]
    whole = all(part.out_features % _PANEL == 0 for part in parts)
    return layers if whole and len(layers) == len(projections) else None


def _updates(blocks: _Blocks) -> tuple[Updates, Updates] | None:
    """Updates of adapters in attention and in the MLP; None if the kernels cannot apply them."""
    attention, mlp = Updates(), Updates()
    wrapped = next((each for each in blocks.projections if isinstance(each, LoraLinear)), None)
    segments = wrapped.segments if wrapped is not None else ()
    if not segments:
        return attention, mlp
    if blocks.adaptable is None:
        return None
    query, key, value, out, gate, up, down = blocks.adaptable
    for each in segments:
        name, start, stop = each.key, each.start, each.stop
        attention.add(start, stop, query.packed(name, (key, value)), out.packed(name))
        mlp.add(start, stop, gate.packed(name, (up,)), down.packed(name))
    return attention, mlp


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
    """Whether the norm of single heads, if there is one, differs from `norm` only in its weight."""
    if not isinstance(module, FusedRmsNorm):
        return module is None
    return (module.eps, module.shifted) == (norm.eps, norm.shifted)


def _weight(module: nn.Module | None) -> Tensor | None:
    return module.weight.detach() if isinstance(module, FusedRmsNorm) else None
