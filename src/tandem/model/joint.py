"""Frozen projections of the same input as one product, with the adapter's updates, forwards and
backwards; and the arithmetic of a layer's gradient over them.

Two arithmetics do the same steps: torch's on rows, in any dtype, and our kernels' on tiles, in
bfloat16. An operand is the input of a product: rows for the one, tiles for the other. A low-rank
product is scaled once by its adapter's factor, so both of its gradients are plain products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.model import kernels
from tandem.model.attention.base import AttentionParams
from tandem.model.attention.dense import DenseContext
from tandem.model.fused_layer import FusedLayer
from tandem.model.kernels import backward
from tandem.model.kernels.backward import DenseShape, Update
from tandem.model.kernels.layer import NormWeights, Panels
from tandem.model.linear import AmxWeight, PackedLinear
from tandem.model.lora_files import LoraWeights

# d/d(a), d/d(b) by the module's name.
PairGradients = dict[str, tuple[Tensor | None, Tensor | None]]
_STEP = 32


@dataclass(frozen=True, slots=True)
class Member:
    """Columns start:end of a joint projection. Its update has columns low:low + rank."""

    name: str
    start: int
    end: int
    low: int
    rank: int


class Joint:
    """Projections side by side.

    `a` [ranks, in] and `b` [out, ranks] hold all their updates, `scale` float32 [ranks] their
    factors. Ranks are padded to a multiple of 32. All are None without an adapter.
    """

    def __init__(
        self,
        frozen: PackedLinear,
        parts: Sequence[tuple[str, int, int]],
        adapter: Mapping[str, LoraWeights],
    ) -> None:
        """`parts` are (name, first column, end column) of each projection."""
        self.frozen = frozen
        self.members: list[Member] = []
        low = 0
        for name, start, end in parts:
            rank = adapter[name].a.shape[0] if name in adapter else 0
            self.members.append(Member(name, start, end, low, rank))
            low += rank
        self.a: Tensor | None = None
        self.b: Tensor | None = None
        self.scale: Tensor | None = None
        if low:
            self._join(adapter, -(-low // _STEP) * _STEP)

    def _join(self, adapter: Mapping[str, LoraWeights], ranks: int) -> None:
        like = next(adapter[each.name].a for each in self.members if each.rank)
        self.a = like.new_zeros(ranks, self.frozen.in_features)
        self.b = like.new_zeros(self.frozen.out_features, ranks)
        self.scale = torch.zeros(ranks, device=like.device)
        with torch.no_grad():
            for each in self.members:
                if each.rank:
                    weights = adapter[each.name]
                    columns = slice(each.low, each.low + each.rank)
                    self.a[columns] = weights.a
                    self.b[each.start : each.end, columns] = weights.b
                    self.scale[columns] = weights.scale

    def split(self, a: Tensor, b: Tensor, found: PairGradients) -> None:
        """Put gradients of `a` and of `b` transposed, each [ranks, ...], into `found` by name."""
        for each in self.members:
            if each.rank:
                columns = slice(each.low, each.low + each.rank)
                found[each.name] = (a[columns], b[columns, each.start : each.end].t())


class TorchArithmetic:
    """The arithmetic on rows, with torch, in any dtype."""

    def __init__(self, layer: FusedLayer, heads: int, kv_heads: int, context: DenseContext) -> None:
        self._layer = layer
        self._heads = (heads, kv_heads, kv_heads)
        self._context = context

    def operand(self, rows: Tensor) -> Tensor:
        """The operand of [rows, width]."""
        return rows

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """The operand of normalised rows."""
        return kernels.rms_norm(x, norm.weight, norm.eps, norm.shifted)

    def low(self, operand: Tensor, joint: Joint) -> Tensor | None:
        """The update's low-rank product [rows, ranks], scaled."""
        if joint.a is None or joint.scale is None:
            return None
        return (operand @ joint.a.t()) * joint.scale.to(operand.dtype)

    def low_back(self, gradient: Tensor, joint: Joint) -> Tensor | None:
        """Gradient of the update's low-rank product, [rows, ranks], scaled."""
        if joint.b is None or joint.scale is None:
            return None
        return (gradient @ joint.b) * joint.scale.to(gradient.dtype)

    def rows(
        self, operand: Tensor, joint: Joint, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The projection plus `residual` as rows, and its low-rank product."""
        low = self.low(operand, joint)
        out = joint.frozen.weights.multiply(operand)
        if low is not None and joint.b is not None:
            out = torch.addmm(out, low, joint.b.t())
        return (out if residual is None else residual + out), low

    def inner(self, operand: Tensor, joint: Joint) -> tuple[Tensor, Tensor | None]:
        """The projection in the form that `gated` reads, and its low-rank product."""
        return self.rows(operand, joint)

    def gated(self, joined: Tensor) -> Tensor:
        """The operand act(gate) * up."""
        gate, up = joined.chunk(2, dim=-1)
        result: Tensor = self._layer.mlp.act_fn(gate) * up
        return result

    def rows_back(self, gradient: Tensor, joint: Joint, low: Tensor | None) -> Tensor:
        """d/d(input) of a projection, as rows. `low` is from `low_back`."""
        out = joint.frozen.backward_weights().multiply(gradient)
        if low is None or joint.a is None:
            return out
        return torch.addmm(out, low, joint.a)

    def gate_back(
        self, gradient: Tensor, joint: Joint, low: Tensor | None, joined: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Operands: d/d(joined) through the gate and the projection `joint`, and `gated`."""
        product = self.rows_back(gradient, joint, low)
        with torch.enable_grad():
            leaf = joined.detach().requires_grad_()
            gated = self.gated(leaf)
        (result,) = torch.autograd.grad(gated, leaf, product)
        return result, gated.detach()

    def pairs(
        self,
        entering: Tensor,
        low: Tensor | None,
        gradient: Tensor,
        low_gradient: Tensor | None,
        joint: Joint,
        found: PairGradients,
    ) -> None:
        """Gradients of the adapter's matrices, from the projection's input operand, the gradient of
        its output, and the low-rank products of both."""
        if low is not None and low_gradient is not None:
            joint.split(low_gradient.t() @ entering, low.t() @ gradient, found)

    def attend(self, turned: Tensor) -> tuple[Tensor, ...]:
        """Attention [rows, heads * d] of turned rows of heads, and what `attend_back` needs."""
        attention = self._layer.self_attn
        params = AttentionParams(attention.scaling, attention.window, attention.softcap)
        with torch.enable_grad():
            leaf = turned.detach().requires_grad_()
            heads = leaf.unflatten(-1, (-1, attention.head_dim))
            query, key, value = heads.split(self._heads, dim=1)
            mixed = self._context.attend(attention.layer_idx, query, key, value, params).flatten(1)
        return mixed, leaf

    def attend_back(self, attended: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """d/d(turned), dense."""
        mixed, leaf = attended
        (result,) = torch.autograd.grad(mixed, leaf, gradient, retain_graph=True)
        return result.contiguous()


class TileArithmetic:
    """The arithmetic on tiles, with our kernels, in bfloat16. Its methods are
    `TorchArithmetic`'s."""

    def __init__(self, layer: FusedLayer, heads: int, kv_heads: int, context: DenseContext) -> None:
        attention = layer.self_attn
        self._gelu = layer.mlp.gelu
        self._rows = sum(context.lengths)
        self._shape = DenseShape(
            context.lengths, heads, kv_heads, attention.scaling, attention.window
        )
        self._packed: dict[int, Panels] = {}

    def operand(self, rows: Tensor) -> Tensor:
        """Tiles of rows [rows, width]."""
        return backward.row_tiles(rows)

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """Tiles of normalised rows."""
        return backward.norm_tiles(x, norm)

    def low(self, operand: Tensor, joint: Joint) -> Tensor | None:
        """The update's low-rank product as tiles, scaled."""
        if joint.a is None:
            return None
        return backward.updated_tiles(operand, _pack(joint.a), None, joint.scale)

    def low_back(self, gradient: Tensor, joint: Joint) -> Tensor | None:
        """Gradient of the update's low-rank product as tiles, scaled."""
        if joint.b is None:
            return None
        return backward.updated_tiles(gradient, _pack(joint.b.t()), None, joint.scale)

    def rows(
        self, operand: Tensor, joint: Joint, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The projection plus `residual` as rows, and its low-rank product."""
        low = self.low(operand, joint)
        size = (self._rows, joint.frozen.out_features)
        update = _update(low, joint.b)
        return backward.updated_rows(operand, _panels(joint), update, size, residual), low

    def inner(self, operand: Tensor, joint: Joint) -> tuple[Tensor, Tensor | None]:
        """The projection as tiles, and its low-rank product."""
        low = self.low(operand, joint)
        return backward.updated_tiles(operand, _panels(joint), _update(low, joint.b)), low

    def gated(self, joined: Tensor) -> Tensor:
        """Tiles of act(gate) * up."""
        return backward.gated_tiles(joined, self._gelu)

    def rows_back(self, gradient: Tensor, joint: Joint, low: Tensor | None) -> Tensor:
        """d/d(input) of a projection, as rows."""
        size = (self._rows, joint.frozen.in_features)
        return backward.updated_rows(gradient, _back_panels(joint), _back_update(low, joint), size)

    def gate_back(
        self, gradient: Tensor, joint: Joint, low: Tensor | None, joined: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tiles of d/d(joined) through the gate and the projection, and of `gated`."""
        update = _back_update(low, joint)
        return backward.gate_gradients(gradient, _back_panels(joint), update, joined, self._gelu)

    def pairs(
        self,
        entering: Tensor,
        low: Tensor | None,
        gradient: Tensor,
        low_gradient: Tensor | None,
        joint: Joint,
        found: PairGradients,
    ) -> None:
        """Gradients of the adapter's matrices."""
        if low is not None and low_gradient is not None:
            a = backward.thin_product(low_gradient, entering)
            joint.split(a, backward.thin_product(low, gradient), found)

    def attend(self, turned: Tensor) -> tuple[Tensor, ...]:
        """Attention of turned rows, and what `attend_back` needs."""
        return (*backward.dense_attention(turned, self._shape), turned)

    def attend_back(self, attended: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """d/d(turned), dense."""
        mixed, sums, turned = attended
        return backward.dense_attention_gradient(turned, (mixed, sums), gradient, self._shape)


def tiled(joints: Sequence[Joint], head_dim: int) -> bool:
    """Whether `TileArithmetic` can compute these projections."""
    widths = [
        width for each in joints for width in (each.frozen.in_features, each.frozen.out_features)
    ]
    return (
        all(isinstance(each.frozen.weights, AmxWeight) for each in joints)
        and all(width % _STEP == 0 for width in widths)
        and head_dim % _STEP == 0
    )


def _pack(weight: Tensor) -> Panels:
    return Panels(kernels.pack_weight(weight.contiguous()), None)


def _update(low: Tensor | None, up: Tensor | None) -> Update | None:
    """An update: `low` times the transposed `up` [out, ranks]."""
    if low is None or up is None:
        return None
    return Update(low, _pack(up).packed)


def _back_update(low: Tensor | None, joint: Joint) -> Update | None:
    return _update(low, joint.a.t() if joint.a is not None else None)


def _panels(joint: Joint) -> Panels:
    weights: Any = joint.frozen.weights
    return weights.panels


def _back_panels(joint: Joint) -> Panels:
    weights: Any = joint.frozen.backward_weights()
    return weights.panels
