"""A decoder layer of the Llama kind, recomputed and differentiated by hand.

Queries, keys and values share one product, and so do gate and up projection, forwards and
backwards, with low-rank updates. Keeps only what the formulas need. Knows no trainer. Invariant:
its gradients are those of autograd, for sequences that begin at their first row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from tandem.model import kernels
from tandem.model.attention.dense import DenseContext
from tandem.model.fused import FusedRmsNorm
from tandem.model.fused_layer import FusedLayer
from tandem.model.joint import Joint, PairGradients, TileArithmetic, TorchArithmetic, tiled
from tandem.model.kernels.backward import (
    HeadTurn,
    rms_norm_gradient,
    turn_heads,
    turn_heads_gradient,
)
from tandem.model.kernels.layer import NormWeights
from tandem.model.linear import GroupMember, PackedLinear
from tandem.model.lora import LoraLinear
from tandem.model.lora_files import LoraWeights
from tandem.model.stack import Replay

_SIDE = 32


@dataclass(frozen=True, slots=True)
class Kept:
    """What the gradient needs of the forward, beside the layer's input."""

    qkv: Tensor  # [rows, heads]: queries, keys and values before they are turned
    attended: tuple[Tensor, ...]  # of the arithmetic; the first is attention's output
    middle: Tensor  # [rows, width]: input of the second norm
    gate_up: Tensor  # rows or tiles
    low_qkv: Tensor | None  # low-rank products
    low_out: Tensor | None
    low_gate_up: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        lows = (self.low_qkv, self.low_out, self.low_gate_up)
        tensors = (self.qkv, *self.attended, self.middle, self.gate_up, *lows)
        return sum(each.nbytes for each in tensors if each is not None)


@dataclass(frozen=True, slots=True)
class Inner:
    """The part of `Kept` that the layer's own kernels can export. `gate_up` is in tiles."""

    middle: Tensor
    gate_up: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.middle.nbytes + self.gate_up.nbytes


class LayerGradient:
    """One layer with one adapter over the rows of some sequences."""

    def __init__(
        self,
        layer: FusedLayer,
        adapter: Mapping[str, LoraWeights],
        angles: tuple[Tensor, Tensor],
        context: DenseContext,
    ) -> None:
        """`adapter` uses the names of the layer's modules. `angles` are [1, rows, R] each."""
        attention, mlp = layer.self_attn, layer.mlp
        self._norm = _norm(layer.input_layernorm)
        self._mlp_norm = _norm(layer.post_attention_layernorm)
        names = [f"self_attn.{each}_proj" for each in "qkv"]
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._qkv = _joint(names, parts, adapter)
        self._out = _joint(["self_attn.o_proj"], (attention.o_proj,), adapter)
        names = ["mlp.gate_proj", "mlp.up_proj"]
        self._gate_up = _joint(names, (mlp.gate_proj, mlp.up_proj), adapter)
        self._down = _joint(["mlp.down_proj"], (mlp.down_proj,), adapter)
        heads, kv_heads = (
            (each.end - each.start) // attention.head_dim for each in self._qkv.members[:2]
        )
        cos, sin = (each[0].contiguous() for each in angles)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        head_norm = _norm(q_norm) if isinstance(q_norm, FusedRmsNorm) else self._norm
        self._turn = HeadTurn(
            _weight(q_norm), _weight(k_norm), head_norm, cos, sin, heads, kv_heads
        )
        joints = (self._qkv, self._out, self._gate_up, self._down)
        arithmetic = TileArithmetic if tiled(joints, attention.head_dim) else TorchArithmetic
        self._by = arithmetic(layer, heads, kv_heads, context)

    def forward(self, x: Tensor, inner: Inner | None = None) -> Kept:
        """All but the last product, for dense x [rows, width]. Uses `inner` if it was kept."""
        by = self._by
        qkv, low_qkv = by.rows(by.norm(x, self._norm), self._qkv)
        attended = by.attend(turn_heads(qkv, self._turn))
        mixed = by.operand(attended[0].detach())
        if inner is not None:
            low_out = by.low(mixed, self._out)
            low_gate_up = by.low(by.norm(inner.middle, self._mlp_norm), self._gate_up)
            kept = (inner.middle, inner.gate_up)
            return Kept(qkv, attended, *kept, low_qkv, low_out, low_gate_up)
        middle, low_out = by.rows(mixed, self._out, x)
        gate_up, low_gate_up = by.inner(by.norm(middle, self._mlp_norm), self._gate_up)
        return Kept(qkv, attended, middle, gate_up, low_qkv, low_out, low_gate_up)

    def finish(self, kept: Kept) -> Tensor:
        """Output [rows, width] of the layer."""
        by = self._by
        return by.rows(by.gated(kept.gate_up), self._down, kept.middle)[0]

    def backward(
        self, x: Tensor, kept: Kept, gradient: Tensor, below: bool
    ) -> tuple[Tensor | None, PairGradients]:
        """For d/d(output), dense [rows, width]: d/dx if `below` wants it, and d/d(adapter)."""
        found: PairGradients = {}
        middle = self._mlp_backward(kept, gradient, found)
        return self._attention_backward(x, kept, middle, below, found), found

    def _mlp_backward(self, kept: Kept, gradient: Tensor, found: PairGradients) -> Tensor:
        by, down, gate_up = self._by, self._down, self._gate_up
        leaving = by.operand(gradient)
        low_leaving = by.low_back(leaving, down)
        inner, product = by.gate_back(leaving, down, low_leaving, kept.gate_up)
        by.pairs(product, by.low(product, down), leaving, low_leaving, down, found)
        del product
        low_inner = by.low_back(inner, gate_up)
        entering = by.norm(kept.middle, self._mlp_norm)
        by.pairs(entering, kept.low_gate_up, inner, low_inner, gate_up, found)
        normal = by.rows_back(inner, gate_up, low_inner)
        return rms_norm_gradient(kept.middle, self._mlp_norm, normal, gradient)

    def _attention_backward(
        self, x: Tensor, kept: Kept, gradient: Tensor, below: bool, found: PairGradients
    ) -> Tensor | None:
        by, out, qkv = self._by, self._out, self._qkv
        leaving = by.operand(gradient)
        low_leaving = by.low_back(leaving, out)
        mixed = by.operand(kept.attended[0].detach())
        by.pairs(mixed, kept.low_out, leaving, low_leaving, out, found)
        heads = by.attend_back(kept.attended, by.rows_back(leaving, out, low_leaving))
        turn_heads_gradient(heads, kept.qkv, self._turn)
        inner = by.operand(heads)
        low_inner = by.low_back(inner, qkv)
        by.pairs(by.norm(x, self._norm), kept.low_qkv, inner, low_inner, qkv, found)
        if not below:
            return None
        return rms_norm_gradient(x, self._norm, by.rows_back(inner, qkv, low_inner), gradient)


def layer_gradient(
    replay: Replay, index: int, adapter: Mapping[str, LoraWeights]
) -> LayerGradient | None:
    """Layer `index` of `replay`, with the adapter's weights by module name. None if this kind of
    layer is not known here."""
    called = replay.called(index)
    if called is None:
        return None
    layer, arguments = called
    context = arguments["attention_context"]
    if not isinstance(layer, FusedLayer) or not isinstance(context, DenseContext):
        return None
    if arguments["attention_mask"] is not None:
        return None
    return LayerGradient(layer, adapter, arguments["position_embeddings"], context)


def inner_room(layer: nn.Module, rows: int) -> Inner | None:
    """Memory for `Inner` with this many rows of `layer`. None if its kernels do not export, or its
    gradient would not read it."""
    if not isinstance(layer, FusedLayer) or not kernels.amx_linear():
        return None
    attention, mlp = layer.self_attn, layer.mlp
    gate_up = _joint(["gate", "up"], (mlp.gate_proj, mlp.up_proj), {})
    joints = (
        _joint(["q", "k", "v"], (attention.q_proj, attention.k_proj, attention.v_proj), {}),
        _joint(["o"], (attention.o_proj,), {}),
        gate_up,
        _joint(["down"], (mlp.down_proj,), {}),
    )
    if not tiled(joints, attention.head_dim):
        return None
    like = layer.input_layernorm.weight.detach()
    steps = gate_up.frozen.out_features // _SIDE
    tiles = like.new_empty(-(-rows // _SIDE), steps, _SIDE, _SIDE)
    tiles[-1].zero_()  # rows past the end are finite
    return Inner(like.new_empty(rows, gate_up.frozen.in_features), tiles)


def _joint(
    names: list[str], parts: tuple[nn.Module, ...], adapter: Mapping[str, LoraWeights]
) -> Joint:
    """The projections `parts`, which read the same input, as one joint product."""
    frozen = [each.base if isinstance(each, LoraLinear) else each for each in parts]
    first = frozen[0]
    if isinstance(first, GroupMember):
        members = first.group.members
        assert list(frozen) == members
        columns = [(name, m.start, m.end) for name, m in zip(names, members, strict=True)]
        return Joint(first.group.joined, columns, adapter)
    assert isinstance(first, PackedLinear) and len(frozen) == 1
    return Joint(first, [(names[0], 0, first.out_features)], adapter)


def _norm(module: FusedRmsNorm) -> NormWeights:
    return NormWeights(module.weight.detach(), module.eps, module.shifted)


def _weight(module: nn.Module | None) -> Tensor | None:
    return module.weight.detach() if isinstance(module, FusedRmsNorm) else None
