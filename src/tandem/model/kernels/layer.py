"""The two halves of a decoder layer as one kernel call each, with weights as plain data.

Each call gives exactly the values of the single kernels in sequence, without storing what is
between them. Not differentiable. With `Panels` bfloat16 only, callable if `kernels.amx_linear()`;
with `VectorPanels` float32 or bfloat16, callable if `kernels.status().available`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class NormWeights:
    """An RMS norm; see `kernels.rms_norm`."""

    weight: Tensor
    eps: float
    shifted: bool


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight packed by `kernels.pack_weight`, and its padded float32 bias."""

    packed: Tensor
    bias: Tensor | None


class VectorPanels(Panels):
    """A weight packed by `kernels.pack_panels`, and its float32 bias."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Queries, keys and values are joined in `qkv`. Head norms have the form of `norm`. All weights
    of a layer are in panels of one kind."""

    norm: NormWeights
    qkv: Panels
    out: Panels
    query_norm: Tensor | None
    key_norm: Tensor | None
    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Gate and up are joined in `gate_up`. The gate is SiLU, or GELU's tanh form with `gelu`."""

    norm: NormWeights
    gate_up: Panels
    down: Panels
    gelu: bool


@dataclass(frozen=True, slots=True)
class BatchTables:
    """Where the rows of an iteration are in the cache and what they see.

    `slots` int64 [rows] is as in `kernels.write_kv`; the others are int32, as in
    `kernels.paged_attention`.
    """

    slots: Tensor
    blocks: Tensor
    query_start: Tensor
    context_len: Tensor


@dataclass(frozen=True, slots=True)
class PackedLora:
    """One adapter's update of the layers that one product computes: all their `a` joined, the
    factor of each of its columns, and each layer's `b`. Without an update it has no columns."""

    a: Tensor
    factors: Tensor
    b: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in (self.a, self.factors, *self.b))

    @staticmethod
    def of(halves: Sequence[tuple[Tensor, Tensor]], scales: Sequence[float]) -> PackedLora:
        """From dense bfloat16 `a` [rank, in] and `b` [out, rank] of each layer. The rank may be 0.

        `in` is a multiple of 32, and so is every `out` except the last.
        """
        packed = torch.ops.tandem.pack_lora.default([a for a, _ in halves], [b for _, b in halves])
        factors: list[float] = []
        for b, scale in zip(packed[1:], scales, strict=True):
            factors += [scale] * (b.shape[1] * _SIDE)
        return PackedLora(packed[0], torch.tensor(factors), tuple(packed[1:]))

    @staticmethod
    def in_panels(halves: Sequence[tuple[Tensor, Tensor]], scales: Sequence[float]) -> PackedLora:
        """The same for vector panels, in the dtype of the halves. Ranks become even."""
        pack = torch.ops.tandem.pack_panels.default
        all_a, all_b, factors = [], [], list[float]()
        for (a, b), scale in zip(halves, scales, strict=True):
            odd = a.shape[0] % 2
            all_a.append(functional.pad(a, (0, 0, 0, odd)))
            all_b.append(pack(functional.pad(b, (0, odd)).contiguous()))
            factors += [scale] * (a.shape[0] + odd)
        return PackedLora(pack(torch.cat(all_a)), torch.tensor(factors), tuple(all_b))


@dataclass(frozen=True, slots=True)
class Updates:
    """Updates of adapters in one call. `segments` has the first row and the end of each; the lists
    have its tensors for the first and the second product of the block."""

    segments: list[int] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)

    def add(self, start: int, stop: int, first: PackedLora, second: PackedLora) -> None:
        """Rows start:stop use this adapter."""
        self.segments.extend((start, stop))
        self.first.extend((first.a, first.factors, *first.b))
        self.second.extend((second.a, second.factors, *second.b))


@dataclass(frozen=True, slots=True)
class Exports:
    """Where gate and up of some rows are written as well. For each of `tiles`, `ranges` has the
    first row, the end, and the first row within the tiles [blocks, steps, 32, 32]."""

    ranges: list[int] = field(default_factory=list)
    tiles: list[Tensor] = field(default_factory=list)


_SIDE = 32
_NONE = Updates()
_NOWHERE = Exports()


def attention_block(
    x: Tensor,
    weights: AttentionWeights,
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    tables: BatchTables,
    updates: Updates = _NONE,
    wanted: Tensor | None = None,
) -> Tensor:
    """x + out(attention(norm(x))) for a dense x [1, T, hidden]. Keys and values are cached.

    `angles` are cosine and sine [..., R], dense, one row per token. `cache` is keys and values.
    With `wanted`, int64 row numbers, the result has only these rows; `updates` must be empty then.
    """
    norm, qkv, out = weights.norm, weights.qkv, weights.out
    ops = torch.ops.tandem
    vectors = isinstance(qkv, VectorPanels)
    operator = ops.panel_attention_block if vectors else ops.attention_block
    return operator.default(
        x,
        norm.weight,
        norm.eps,
        norm.shifted,
        qkv.packed,
        qkv.bias,
        weights.query_norm,
        weights.key_norm,
        out.packed,
        out.bias,
        *angles,
        *cache,
        tables.slots,
        tables.blocks,
        tables.query_start,
        tables.context_len,
        weights.scale,
        weights.window,
        weights.softcap,
        updates.segments,
        updates.first,
        updates.second,
        wanted,
    )


def mlp_block(
    x: Tensor, weights: MlpWeights, updates: Updates = _NONE, exports: Exports = _NOWHERE
) -> Tensor:
    """x + down(act(gate(n)) * up(n)) with n = norm(x), for a dense x [..., hidden].

    Vector panels export nothing.
    """
    norm, gate_up, down = weights.norm, weights.gate_up, weights.down
    arguments = (
        x,
        norm.weight,
        norm.eps,
        norm.shifted,
        gate_up.packed,
        gate_up.bias,
        down.packed,
        down.bias,
        weights.gelu,
        updates.segments,
        updates.first,
        updates.second,
    )
    if isinstance(gate_up, VectorPanels):
        assert not exports.ranges
        return torch.ops.tandem.panel_mlp_block.default(*arguments)
    return torch.ops.tandem.mlp_block.default(*arguments, exports.ranges, exports.tiles)
