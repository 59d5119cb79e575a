"""A decoder layer of the Llama kind, recomputed and differentiated by hand.

Queries, keys and values share one product, and so do gate and up projection, forwards and
backwards, with low-rank updates. Keeps only what the formulas need. Knows no trainer. Invariant:
its gradients are those of autograd, for sequences that begin at their first row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tandem.model import kernels
from tandem.model.arithmetic import LayerShape, TileArithmetic, TorchArithmetic
from tandem.model.attention.base import AttentionParams
from tandem.model.attention.dense import DenseContext
from tandem.model.attention.gradient import HeadShape
from tandem.model.fused import FusedRmsNorm
from tandem.model.fused_layer import FusedLayer, norm_of, weight_of
from tandem.model.gradient_rows import GradientKernels
from tandem.model.joint import STEP, Joint, PairGradients, tiled
from tandem.model.kernels.backward import HeadTurn
from tandem.model.linear import GroupMember, PackedLinear
from tandem.model.lora import LoraLinear
from tandem.model.lora_files import LoraWeights
from tandem.model.stack import Replay

_SIDE = 32
# Ranks of a joined update are a multiple of this: 16 bytes in 16 bits, as matrix units read.
_LINE = 8


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
    """The part of `Kept` that the layer's own kernels can export. `gate_up` is in rows or tiles, as
    the layer's arithmetic reads it."""

    middle: Tensor
    gate_up: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.middle.nbytes + self.gate_up.nbytes


@dataclass(frozen=True, slots=True)
class LayerJoints:
    """The products of one layer; `tiles` says whether their arithmetic is that on tiles."""

    tiles: bool
    qkv: Joint
    out: Joint
    gate_up: Joint
    down: Joint

    @property
    def nbytes(self) -> int:
        """Bytes of the joined matrices."""
        return sum(each.nbytes for each in (self.qkv, self.out, self.gate_up, self.down))


class LayerGradient:
    """One layer with one adapter over the rows of some sequences."""

    def __init__(
        self,
        layer: FusedLayer,
        joints: LayerJoints,
        angles: tuple[Tensor, Tensor],
        context: DenseContext,
        by: GradientKernels,
    ) -> None:
        """`angles` are [1, rows, R] each."""
        attention = layer.self_attn
        self._norm = norm_of(layer.input_layernorm)
        self._mlp_norm = norm_of(layer.post_attention_layernorm)
        self._qkv, self._out = joints.qkv, joints.out
        self._gate_up, self._down = joints.gate_up, joints.down
        heads, kv_heads = (
            (each.end - each.start) // attention.head_dim for each in self._qkv.members[:2]
        )
        cos, sin = (each[0].contiguous() for each in angles)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        head_norm = norm_of(q_norm) if isinstance(q_norm, FusedRmsNorm) else self._norm
        self._turn = HeadTurn(
            weight_of(q_norm), weight_of(k_norm), head_norm, cos, sin, heads, kv_heads
        )
        self._rows = by.rows
        params = AttentionParams(attention.scaling, attention.window, attention.softcap)
        shape = HeadShape(attention.layer_idx, attention.head_dim, heads, kv_heads, params)
        whole = LayerShape(shape, layer.mlp.gelu, context)
        self._by = TileArithmetic(whole) if joints.tiles else TorchArithmetic(whole, by)

    def forward(self, x: Tensor, inner: Inner | None = None) -> Kept:
        """All but the last product, for dense x [rows, width]. Uses `inner` if it was kept."""
        by = self._by
        qkv, low_qkv = by.rows(by.norm(x, self._norm), self._qkv)
        attended = by.attend(self._rows.turn_heads(qkv, self._turn))
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
        return self._rows.rms_norm_gradient(kept.middle, self._mlp_norm, normal, gradient)

    def _attention_backward(
        self, x: Tensor, kept: Kept, gradient: Tensor, below: bool, found: PairGradients
    ) -> Tensor | None:
        by, out, qkv = self._by, self._out, self._qkv
        leaving = by.operand(gradient)
        low_leaving = by.low_back(leaving, out)
        mixed = by.operand(kept.attended[0].detach())
        by.pairs(mixed, kept.low_out, leaving, low_leaving, out, found)
        heads = by.attend_back(kept.attended, by.rows_back(leaving, out, low_leaving))
        inner = by.operand(self._rows.turn_heads_gradient(heads, kept.qkv, self._turn))
        low_inner = by.low_back(inner, qkv)
        by.pairs(by.norm(x, self._norm), kept.low_qkv, inner, low_inner, qkv, found)
        if not below:
            return None
        normal = by.rows_back(inner, qkv, low_inner)
        return self._rows.rms_norm_gradient(x, self._norm, normal, gradient)


class LayerGradients:
    """The gradients of all layers with one adapter at one revision.

    Joined matrices are made at the first use of a layer and serve until the revision ends.
    """

    def __init__(
        self, adapters: Sequence[Mapping[str, LoraWeights]], by: GradientKernels | None
    ) -> None:
        """`adapters` of each layer use the names of its modules."""
        self._adapters = adapters
        self._by = by
        self._joints: dict[int, LayerJoints] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the joined matrices that exist now."""
        return sum(each.nbytes for each in self._joints.values())

    def of(self, replay: Replay, index: int) -> LayerGradient | None:
        """Layer `index` over the rows of `replay`. None if this kind of layer is not known here."""
        called = replay.called(index)
        if called is None or self._by is None:
            return None
        layer, arguments = called
        context = arguments["attention_context"]
        if not isinstance(layer, FusedLayer) or not isinstance(context, DenseContext):
            return None
        if arguments["attention_mask"] is not None:
            return None
        joints = self._joints.get(index)
        if joints is None:
            joints = self._joints[index] = _joints(layer, self._adapters[index])
        return LayerGradient(layer, joints, arguments["position_embeddings"], context, self._by)


def joined_numbers(layer: nn.Module, ranks: Mapping[str, int]) -> int:
    """Most numbers in the joined matrices of a layer, for ranks by the names of its modules."""
    if not isinstance(layer, FusedLayer):
        return 0
    found, step = 0, _step(layer)
    for names, modules in _groups(layer):
        joined = sum(ranks.get(name, 0) for name in names)
        frozen = _frozen(modules)
        found += -(-joined // step) * step * (frozen.in_features + frozen.out_features)
    return found


def inner_widths(layer: nn.Module) -> tuple[int, int] | None:
    """Columns of `Inner` in rows: of `middle` and of `gate_up`. None if the layer's kernels do not
    export rows, or its gradient would not read them."""
    if not isinstance(layer, FusedLayer) or not layer.whole.exports_rows or _on_tiles(layer):
        return None
    gate_up = _frozen((layer.mlp.gate_proj, layer.mlp.up_proj))
    return gate_up.in_features, gate_up.out_features


def inner_room(layer: nn.Module, rows: int) -> Inner | None:
    """Memory for `Inner` in tiles with this many rows of `layer`. None if its kernels do not export
    them, or its gradient would not read them."""
    if not isinstance(layer, FusedLayer) or not kernels.amx_linear():
        return None
    if not _on_tiles(layer):
        return None
    gate_up = _frozen((layer.mlp.gate_proj, layer.mlp.up_proj))
    like = layer.input_layernorm.weight.detach()
    steps = gate_up.out_features // _SIDE
    tiles = like.new_empty(-(-rows // _SIDE), steps, _SIDE, _SIDE)
    tiles[-1].zero_()  # rows past the end are finite
    return Inner(like.new_empty(rows, gate_up.in_features), tiles)


def _groups(layer: FusedLayer) -> list[tuple[tuple[str, ...], tuple[nn.Module, ...]]]:
    """Names and modules of the projections that share an input."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            (attention.q_proj, attention.k_proj, attention.v_proj),
        ),
        (("self_attn.o_proj",), (attention.o_proj,)),
        (("mlp.gate_proj", "mlp.up_proj"), (mlp.gate_proj, mlp.up_proj)),
        (("mlp.down_proj",), (mlp.down_proj,)),
    ]


def _on_tiles(layer: FusedLayer) -> bool:
    return tiled([_frozen(each) for _, each in _groups(layer)], layer.self_attn.head_dim)


def _step(layer: FusedLayer) -> int:
    return STEP if _on_tiles(layer) else _LINE


def _frozen(parts: tuple[nn.Module, ...]) -> PackedLinear:
    """The joined frozen layer of projections that share an input."""
    frozen = _bases(parts)
    first = frozen[0]
    if isinstance(first, GroupMember):
        assert frozen == first.group.members
        return first.group.joined
    assert isinstance(first, PackedLinear) and len(frozen) == 1
    return first


def _bases(parts: tuple[nn.Module, ...]) -> list[nn.Module]:
    return [each.base if isinstance(each, LoraLinear) else each for each in parts]


def _joints(layer: FusedLayer, adapter: Mapping[str, LoraWeights]) -> LayerJoints:
    step, found = _step(layer), []
    for names, modules in _groups(layer):
        frozen = _frozen(modules)
        columns = [
            (name, base.start, base.end)
            if isinstance(base, GroupMember)
            else (name, 0, frozen.out_features)
            for name, base in zip(names, _bases(modules), strict=True)
        ]
        found.append(Joint(frozen, columns, adapter, step))
    return LayerJoints(_on_tiles(layer), *found)
