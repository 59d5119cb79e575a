"""A decoder layer of the Llama kind that runs as a few kernel calls whenever that is exact.

That requires: no gradient is wanted, the context is that of the device's attention kernel, and
every projection is the packed, frozen one, with or without adapters. Otherwise its parts are called
one by one, as in transformers. Both ways give the same values, but for roundings with adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    PackedLora,
    Panels,
    Updates,
    VectorPanels,
    attention_block,
    mlp_block,
)
from tandem.model.linear import AmxWeight, GroupMember, PackedLinear, PanelWeight
from tandem.model.lora import JointUpdate, LoraLayers, LoraLinear

# Columns of a panel of any kind divide this.
_PANEL = 32
Projections = tuple[nn.Module | None, ...]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The kernels' view of a layer, valid while its projections are these very modules."""

    projections: Projections
    weights: tuple[AttentionWeights, MlpWeights] | None
    # the projections, if the kernels can apply adapters to them
    adaptable: tuple[LoraLinear, ...] | None = None


class WholeLayer(Protocol):
    """Computes a whole layer in few kernel calls, for one kind of device. `exports_rows` says
    whether it gives intermediate results to the context's `inner_rows`."""

    exports_rows: bool

    def run(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], context: PagedContext
    ) -> Tensor | None:
        """The layer of `hidden` [1, rows, width], same shape, without a gradient. `angles` are
        cosine and sine [1, rows, R]. None if the parts have to be called one by one."""
        ...

    def adapt(self, group: Callable[[Sequence[LoraLinear]], JointUpdate]) -> None:
        """All projections have just been wrapped for adapters. `group` makes the joint update of
        some that read the same input."""
        ...


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The modules of a layer. Adapters may wrap the projections in place at any time."""

    attention: FusedAttention
    mlp: FusedMlp
    norm: FusedRmsNorm
    mlp_norm: FusedRmsNorm

    def projections(self) -> Projections:
        """Query, key, value, out, gate, up and down projection as they are now."""
        attention, mlp = self.attention, self.mlp
        return (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        )


class FusedLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with the parts of the replaced layer."""

    def __init__(self, original: Any, whole: Callable[[LayerParts], WholeLayer]) -> None:
        super().__init__()
        self.self_attn: FusedAttention = original.self_attn
        self.mlp: FusedMlp = original.mlp
        self.input_layernorm: FusedRmsNorm = original.input_layernorm
        self.post_attention_layernorm: FusedRmsNorm = original.post_attention_layernorm
        self.whole = whole(
            LayerParts(
                self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm
            )
        )

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
            and attention_mask is None
            and past_key_values is None
            and cache is None
            and not torch.is_grad_enabled()
        ):
            whole = self.whole.run(hidden_states, position_embeddings, attention_context)
            if whole is not None:
                return whole
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


class CppLayer:
    """A layer as two calls of the C++ kernels, over the CPU kernel's context.

    Every projection has to be packed in panels of one kind, with or without adapters. With adapters
    and AMX it rounds at other places than the parts: an update is added before the product is
    rounded.
    """

    exports_rows = False

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        self._blocks = _Blocks((), None)

    def run(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], context: PagedContext
    ) -> Tensor | None:
        """See `WholeLayer`."""
        if not isinstance(context.batch, CpuBatch):
            return None
        blocks = self.current()
        if blocks.weights is None or (updates := _updates(blocks)) is None:
            return None
        index = self._parts.attention.layer_idx
        cache, tables = context.layers[index], context.batch.tables
        weights = blocks.weights
        # For rows that are not read, the last layer only has to store keys and values.
        last = index == len(context.layers) - 1
        wanted = context.wanted if last and not updates[0].segments else None
        x = attention_block(
            hidden, weights[0], angles, (cache.keys, cache.values), tables, updates[0], wanted
        )
        if wanted is None:
            inner = context.inner
            exports = inner.exports(index, x) if inner is not None else Exports()
            return mlp_block(x, weights[1], updates[1], exports)
        x = mlp_block(x, weights[1], updates[1])
        return torch.zeros_like(hidden).index_copy_(1, wanted, x)

    def adapt(self, group: Callable[[Sequence[LoraLinear]], JointUpdate]) -> None:
        """See `WholeLayer`. The blocks apply updates themselves."""

    def current(self) -> _Blocks:
        """The kernels' view of the layer. Without weights its parts must be called one by one."""
        projections = self._parts.projections()
        # Modules compare by identity.
        if projections != self._blocks.projections:
            weights = self._find(tuple(map(frozen, projections)))
            self._blocks = _Blocks(projections, weights, _adaptable(projections))
        return self._blocks

    def _find(self, projections: Projections) -> tuple[AttentionWeights, MlpWeights] | None:
        attention, mlp = self._parts.attention, self._parts.mlp
        qkv, gate_up = _joined(projections[:3]), _joined(projections[4:6])
        out, down = _panels(projections[3]), _panels(projections[6])
        if qkv is None or gate_up is None or out is None or down is None:
            return None
        if len({type(each) for each in (qkv, gate_up, out, down)}) > 1:
            return None
        gate = projections[4]
        if not isinstance(gate, GroupMember) or gate.out_features % _PANEL:
            return None  # a panel would have both gates and ups
        norm, mlp_norm = norm_of(self._parts.norm), norm_of(self._parts.mlp_norm)
        if not (_alike(attention.q_norm, norm) and _alike(attention.k_norm, norm)):
            return None
        return (
            AttentionWeights(
                norm=norm,
                qkv=qkv,
                out=out,
                query_norm=weight_of(attention.q_norm),
                key_norm=weight_of(attention.k_norm),
                scale=attention.scaling,
                window=attention.window,
                softcap=attention.softcap,
            ),
            MlpWeights(mlp_norm, gate_up, down, mlp.gelu),
        )


def frozen(projection: nn.Module | None) -> nn.Module | None:
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
    assert blocks.weights is not None
    vectors = isinstance(blocks.weights[0].qkv, VectorPanels)
    by = PackedLora.in_panels if vectors else PackedLora.of
    query, key, value, out, gate, up, down = blocks.adaptable
    for each in segments:
        name, start, stop = each.key, each.start, each.stop
        attention.add(start, stop, query.packed(name, by, (key, value)), out.packed(name, by))
        mlp.add(start, stop, gate.packed(name, by, (up,)), down.packed(name, by))
    return attention, mlp


def _joined(members: Projections) -> Panels | None:
    """The weight of a whole group, if these are its members in order."""
    first = members[0]
    if not isinstance(first, GroupMember) or list(members) != list(first.group.members):
        return None
    return _panels(first.group.joined)


def _panels(layer: nn.Module | None) -> Panels | None:
    if isinstance(layer, PackedLinear) and isinstance(layer.weights, AmxWeight | PanelWeight):
        return layer.weights.panels
    return None


def norm_of(module: FusedRmsNorm) -> NormWeights:
    """What kernels need of a norm."""
    return NormWeights(module.weight.detach(), module.eps, module.shifted)


def _alike(module: nn.Module | None, norm: NormWeights) -> bool:
    """Whether the norm of single heads, if there is one, differs from `norm` only in its weight."""
    if not isinstance(module, FusedRmsNorm):
        return module is None
    return (module.eps, module.shifted) == (norm.eps, norm.shifted)


def weight_of(module: nn.Module | None) -> Tensor | None:
    """The weight of a norm, if it is one."""
    return module.weight.detach() if isinstance(module, FusedRmsNorm) else None


def adapt_layers(model: nn.Module, lora: LoraLayers) -> None:
    """Tell the fused layers of `model` that `lora` has wrapped their projections."""
    for module in model.modules():
        if isinstance(module, FusedLayer):
            module.whole.adapt(lora.group)
