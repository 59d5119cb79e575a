"""Triton kernels for a layer's gradient: norm, gate and heads, forwards and backwards, and the
gradients of an adapter's matrices.

One launch each, over dense rows. Sums are in float32, and the forward rounds where the C++ kernels
round. Nothing is differentiable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.gpu.launch import launch
from tandem.model.gradient_rows import Operands
from tandem.model.joint import Joint, PairGradients
from tandem.model.kernels.backward import HeadTurn
from tandem.model.kernels.layer import NormWeights

# Elements of a program of the gate, and heads of one of a turn.
_GATE, _HEADS = 1024, 8
# A tile of the adapter's gradients: ranks, columns, and rows that are summed at once.
_RANKS, _COLUMNS, _ROWS = 64, 128, 64
# Rows in flight; both halves of the kernel have their own, and a small device has 99 KiB.
_STAGES = 2
# Projections that share an input: queries, keys and values.
_MOST_MEMBERS = 3
_WIDE = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, weight, out, width, eps, SHIFTED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = x.dtype.element_ty
    wide = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normal = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normal = normal * (1.0 + w) if SHIFTED else normal.to(kind).to(tl.float32) * w
    tl.store(out + row * width + column, normal.to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_back(  # type: ignore[no-untyped-def]
    x, weight, gradient, residual, out, width, eps,
    SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = scaled * ((1.0 + w) if SHIFTED else w)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    back = tl.sum(scaled * wide, 0) * factor * factor * factor / width
    found = scaled * factor - back * wide
    found += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _activated(  # type: ignore[no-untyped-def]
    gate, GELU: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """act(gate) and its slope, float32."""
    if GELU:  # x / 2 * (1 + tanh(y / 2)) = x * sigmoid(y)
        share = tl.sigmoid(gate * (1.5957691216 + 0.07135481628 * gate * gate))
        steep = 1.5957691216 + 0.21406444884 * gate * gate
    else:
        share = tl.sigmoid(gate)
        steep = 1.0
    return gate * share, share * (1.0 + gate * (1.0 - share) * steep)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    joined, product, out, gated, width,
    GELU: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """act(gate) * up; with BACK also `out` = d/d(joined) for `product` = d/d(gated)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = joined.dtype.element_ty
    at = row * 2 * width + column
    gate = tl.load(joined + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + at + width, mask=inside, other=0.0).to(tl.float32)
    act, slope = _activated(gate, GELU)
    act = act.to(kind).to(tl.float32)
    tl.store(gated + row * width + column, (act * up).to(kind), mask=inside)
    if BACK:
        found = tl.load(product + row * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, (found * up * slope).to(kind), mask=inside)
        tl.store(out + at + width, (found * act).to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    qkv, gradient, query_norm, key_norm, cos, sin, out, eps, heads, kv_heads,
    NORM: tl.constexpr, SHIFTED: tl.constexpr, BACK: tl.constexpr,
    DIM: tl.constexpr, ANGLES: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Some heads of one row. With BACK d/d(qkv) for `gradient` = d/d(turned)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    every = heads + 2 * kv_heads
    inside = (head < every)[:, None] & (column < DIM)[None, :]
    turned = (head < heads + kv_heads)[:, None]
    kind = qkv.dtype.element_ty
    # A rotated number and its partner lie half the angles apart.
    half: tl.constexpr = ANGLES // 2
    rotates = column < ANGLES
    partner = tl.where(rotates, tl.where(column < half, column + half, column - half), column)
    starts = (row * every + head) * DIM
    at, to = starts[:, None] + column[None, :], starts[:, None] + partner[None, :]
    c = tl.load(cos + row * ANGLES + column, mask=rotates, other=1.0).to(tl.float32)
    if BACK:
        found = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(gradient + to, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + row * ANGLES + partner, mask=rotates, other=0.0).to(tl.float32)
        s = tl.where(column < half, s, -s)
        found = tl.where(turned, found * c[None, :] + other * s[None, :], found)
    else:
        found = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(qkv + to, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + row * ANGLES + column, mask=rotates, other=0.0).to(tl.float32)
        s = tl.where(column < half, -s, s)
    if NORM:
        x = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        queries = (head < heads)[:, None]
        near, real = column[None, :], (column < DIM)[None, :]
        w = tl.where(
            queries,
            tl.load(query_norm + near, mask=real, other=0.0).to(tl.float32),
            tl.load(key_norm + near, mask=real, other=0.0).to(tl.float32),
        )
        w = 1.0 + w if SHIFTED else w
        if BACK:
            scaled = found * w
            back = tl.sum(scaled * x, 1)[:, None] * factor * factor * factor / DIM
            found = tl.where(turned, scaled * factor - back * x, found)
        else:
            far = partner[None, :]
            v = tl.where(
                queries,
                tl.load(query_norm + far, mask=real, other=0.0).to(tl.float32),
                tl.load(key_norm + far, mask=real, other=0.0).to(tl.float32),
            )
            v = 1.0 + v if SHIFTED else v
            mine, theirs = found * factor, other * factor
            if not SHIFTED:
                mine, theirs = mine.to(kind).to(tl.float32), theirs.to(kind).to(tl.float32)
            mine, theirs = (mine * w).to(kind), (theirs * v).to(kind)
            found = tl.where(turned, mine.to(tl.float32), found)
            other = tl.where(turned, theirs.to(tl.float32), other)
    if not BACK:
        found = tl.where(turned, found * c[None, :] + other * s[None, :], found)
    tl.store(out + at, found.to(kind), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _thin(  # type: ignore[no-untyped-def]
    thin, wide, rows, ranks, width, rank, real, column, there,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """thin' wide over all rows [.., ranks] and [.., width], for a tile of ranks and columns."""
    total = tl.zeros([RANKS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        some = row < rows
        narrow = tl.load(
            thin + row[None, :] * ranks + rank[:, None],
            mask=real[:, None] & some[None, :],
            other=0.0,
        )
        broad = tl.load(
            wide + row[:, None] * width + column[None, :],
            mask=some[:, None] & there[None, :],
            other=0.0,
        )
        total = tl.dot(narrow, broad, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _pairs(  # type: ignore[no-untyped-def]
    entering, low, gradient, low_gradient, out, rows, inputs, outputs, ranks, used,
    end_0, end_1, rank_0, rank_1, rank_2, scale_0, scale_1, scale_2,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """`out` gets d/d(a) of all members [used, inputs], then d/d(b) of each [columns, rank].

    Axis 0 and 1 are a tile of columns and ranks. On axis 2, 0 is the former, others are members.
    """
    job = tl.program_id(2)
    first = tl.where(job == 2, end_0, tl.where(job == 3, end_1, 0))
    end = tl.where(job == 1, end_0, tl.where(job == 2, end_1, outputs))
    width = tl.where(job == 0, inputs, end - first)
    begin = tl.where(job == 2, rank_0, tl.where(job == 3, rank_0 + rank_1, 0))
    many = tl.where(job == 1, rank_0, tl.where(job == 2, rank_1, rank_2))
    many = tl.where(job == 0, used, many)
    place = tl.where(job == 0, 0, used * inputs)
    place += tl.where(job >= 2, end_0 * rank_0, 0)
    place += tl.where(job == 3, (end_1 - end_0) * rank_1, 0)
    if (tl.program_id(0) * COLUMNS < width) & (tl.program_id(1) * RANKS < many):
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
        there, real = column < width, rank < many
        if job == 0:
            total = _thin(
                low_gradient, entering, rows, ranks, inputs, rank, real, column, there,
                RANKS, COLUMNS, ROWS, PRECISION,
            )  # fmt: skip
        else:
            total = _thin(
                low, gradient, rows, ranks, outputs, begin + rank, real, first + column, there,
                RANKS, COLUMNS, ROWS, PRECISION,
            )  # fmt: skip
        scale = tl.where(job == 1, scale_0, tl.where(job == 2, scale_1, scale_2))
        total *= tl.where(job == 0, 1.0, scale)
        by_rank = rank[:, None] * inputs + column[None, :]
        by_column = column[None, :] * many + rank[:, None]
        to = place + tl.where(job == 0, by_rank, by_column)
        tl.store(out + to, total, mask=real[:, None] & there[None, :])


class TritonGradientRows:
    """`GradientRows` on a CUDA device."""

    def rms_norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """See `GradientRows`."""
        width, out = x.shape[1], torch.empty_like(x)
        block = triton.next_power_of_2(width)
        launch(
            _norm, (x.shape[0],), x, norm.weight, out, width, norm.eps,
            SHIFTED=norm.shifted, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        return out

    def rms_norm_gradient(
        self, x: Tensor, norm: NormWeights, gradient: Tensor, residual: Tensor
    ) -> Tensor:
        """See `GradientRows`."""
        width, out = x.shape[1], torch.empty_like(x)
        block = triton.next_power_of_2(width)
        launch(
            _norm_back, (x.shape[0],), x, norm.weight, gradient, residual, out, width, norm.eps,
            SHIFTED=norm.shifted, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
        return out

    def turn_heads(self, qkv: Tensor, turn: HeadTurn) -> Tensor:
        """See `GradientRows`."""
        return _turned(qkv, None, turn)

    def turn_heads_gradient(self, gradient: Tensor, qkv: Tensor, turn: HeadTurn) -> Tensor:
        """See `GradientRows`."""
        return _turned(qkv, gradient, turn)

    def gated(self, joined: Tensor, gelu: bool) -> Tensor:
        """See `GradientRows`."""
        rows, width = joined.shape[0], joined.shape[1] // 2
        gated = joined.new_empty(rows, width)
        launch(
            _gate, (rows, triton.cdiv(width, _GATE)), joined, gated, joined, gated, width,
            GELU=gelu, BACK=False, BLOCK=_GATE,
        )  # fmt: skip
        return gated

    def gate_gradient(self, joined: Tensor, product: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
        """See `GradientRows`."""
        rows, width = product.shape
        gated, out = torch.empty_like(product), torch.empty_like(joined)
        launch(
            _gate, (rows, triton.cdiv(width, _GATE)), joined, product, out, gated, width,
            GELU=gelu, BACK=True, BLOCK=_GATE,
        )  # fmt: skip
        return out, gated

    def pairs(self, operands: Operands, joint: Joint) -> PairGradients:
        """See `GradientRows`. Views of one float32 tensor."""
        members = joint.members
        assert len(members) <= _MOST_MEMBERS
        rows, outputs = operands.gradient.shape
        inputs, used = operands.entering.shape[1], sum(each.rank for each in members)
        sizes = [used * inputs, *((each.end - each.start) * each.rank for each in members)]
        out = torch.empty(sum(sizes), device=operands.low.device)
        more = _MOST_MEMBERS - len(members)
        ends = [each.end for each in members] + [outputs] * more
        rank = [each.rank for each in members] + [0] * more
        scales = [each.scale for each in members] + [1.0] * more
        tile = min(_RANKS, max(16, triton.next_power_of_2(max(rank))))
        columns = max(inputs, *(each.end - each.start for each in members))
        grid = (triton.cdiv(columns, _COLUMNS), triton.cdiv(used, tile), 1 + len(members))
        launch(
            _pairs, grid, operands.entering, operands.low, operands.gradient,
            operands.low_gradient, out, rows, inputs, outputs, operands.low.shape[1], used,
            ends[0], ends[1], *rank, *scales,
            RANKS=tile, COLUMNS=_COLUMNS, ROWS=_ROWS, num_stages=_STAGES,
            PRECISION="ieee" if out.dtype == operands.low.dtype else "tf32",
        )  # fmt: skip
        parts = out.split(sizes)
        a = parts[0].view(used, inputs)
        return {
            each.name: (a[each.low : each.low + each.rank], b.view(-1, each.rank))
            for each, b in zip(members, parts[1:], strict=True)
            if each.rank
        }


def _turned(qkv: Tensor, gradient: Tensor | None, turn: HeadTurn) -> Tensor:
    rows, out = qkv.shape[0], torch.empty_like(qkv)
    every = turn.heads + 2 * turn.kv_heads
    dim = qkv.shape[1] // every
    norm = turn.query_norm is not None and turn.key_norm is not None
    assert norm or (turn.query_norm is None and turn.key_norm is None)
    launch(
        _turn, (rows, triton.cdiv(every, _HEADS)), qkv, gradient if gradient is not None else qkv,
        turn.query_norm if norm else qkv, turn.key_norm if norm else qkv, turn.cos, turn.sin, out,
        turn.norm.eps, turn.heads, turn.kv_heads,
        NORM=norm, SHIFTED=turn.norm.shifted, BACK=gradient is not None,
        DIM=dim, ANGLES=turn.cos.shape[1], HEADS=_HEADS, BLOCK=triton.next_power_of_2(dim),
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return 4 if block <= _WIDE else 8
