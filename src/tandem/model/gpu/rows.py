"""What a layer does row by row, for CUDA devices: RMS norm, gating and rotation, one launch each.

Sums and functions are in float32. Results are rounded where the C++ kernels round
(`tandem.model.kernels`). The last dimension is dense; the others may have any strides that columns
of a joint product have. Invariant: a new number of rows compiles nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.gpu.early import after_predecessor, early_start
from tandem.model.gpu.launch import launch

# Columns of a program that gates.
_COLUMNS = 1024


@triton.jit(do_not_specialize=["inner"])  # type: ignore[untyped-decorator]
def _normalise(  # type: ignore[no-untyped-def]
    x, residual, weight, total, out, width, inner, x_outer, x_inner, residual_outer, residual_inner,
    eps, ADD: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Row `program_id(0)` of `x`, or with `ADD` of `residual + x`, which `total` gets."""
    line = tl.program_id(0)
    outer, member = (line // inner).to(tl.int64), (line % inner).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    after_predecessor(EARLY)
    row = tl.load(x + outer * x_outer + member * x_inner + column, mask=inside, other=0.0)
    value = row.to(tl.float32)
    to = line.to(tl.int64) * width + column
    if ADD:
        start = residual + outer * residual_outer + member * residual_inner
        value += tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + to, rounded, mask=inside)
        value = rounded.to(tl.float32)
    square = tl.sum(value * value, 0)
    value = value * (1.0 / tl.sqrt(square / width + eps))
    if SHIFTED:
        value = value * (1.0 + factor)
    else:
        value = value.to(out.dtype.element_ty).to(tl.float32) * factor
    tl.store(out + to, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["inner"])  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    x, up, out, width, inner, x_outer, x_inner, up_outer, up_inner,
    GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Columns `program_id(1)` of row `program_id(0)`: act(x) * up, with act(x) rounded first."""
    line = tl.program_id(0)
    outer, member = (line // inner).to(tl.int64), (line % inner).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    after_predecessor(EARLY)
    gate = tl.load(x + outer * x_outer + member * x_inner + column, mask=inside, other=0.0)
    other = tl.load(up + outer * up_outer + member * up_inner + column, mask=inside, other=0.0)
    value = gate.to(tl.float32)
    bent = value
    if GELU:  # x / 2 * (1 + tanh(y / 2)) = x / (1 + e^-y)
        bent = value * (value * value * 0.07135481628 + 1.5957691216)
    value = value / (1.0 + tl.exp(-bent))
    value = value.to(out.dtype.element_ty).to(tl.float32) * other.to(tl.float32)
    to = line.to(tl.int64) * width + column
    tl.store(out + to, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["heads"])  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, out, width, angles, heads, x_token, x_head, cos_row, sin_row,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Head `program_id(0)`, counted token by token. Rounds once."""
    line = tl.program_id(0)
    token, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    half = angles // 2
    turned = column < angles
    first = column < half
    partner = tl.where(first, column + half, column - half)
    after_predecessor(EARLY)
    start = x + token * x_token + head * x_head
    value = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(start + partner, mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + token * cos_row + column, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + token * sin_row + column, mask=turned, other=0.0).to(tl.float32)
    value = value * c + tl.where(first, -other, other) * s
    to = line.to(tl.int64) * width + column
    tl.store(out + to, value.to(out.dtype.element_ty), mask=inside)


class TritonRows:
    """`RowKernels` on a CUDA device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, shifted: bool = False) -> Tensor:
        """RMS norm over the last dimension; dense result."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch_norm(x, None, weight, (out, out), (eps, shifted))
        return out

    def add_rms_norm(
        self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, shifted: bool = False
    ) -> tuple[Tensor, Tensor]:
        """residual + x, rounded, and its norm; both dense."""
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        out = torch.empty_like(total)
        _launch_norm(x, residual, weight, (total, out), (eps, shifted))
        return total, out

    def silu_mul(self, x: Tensor, up: Tensor) -> Tensor:
        """silu(x) * up for two equal shapes; dense result."""
        return _gated(x, up, gelu=False)

    def gelu_tanh_mul(self, x: Tensor, up: Tensor) -> Tensor:
        """gelu(x, tanh form) * up for two equal shapes; dense result."""
        return _gated(x, up, gelu=True)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding of q [..., T, H, D] and k [..., T, KVH, D] by `cos` and `sin`
        [..., T, R]; the first R dimensions are rotated, halves paired."""
        return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    outputs: tuple[Tensor, Tensor],
    form: tuple[float, bool],
) -> None:
    width = x.shape[-1]
    if not (count := x.numel() // width):
        return
    x, inner, *strides = _outer(x)
    added, added_strides = x, strides
    if residual is not None:
        added, _, *added_strides = _outer(residual)
    eps, shifted = form
    block = triton.next_power_of_2(width)
    launch(
        _normalise, (count,), x, added, weight, *outputs, width, inner, *strides, *added_strides,
        eps, ADD=residual is not None, SHIFTED=shifted, BLOCK=block,
        num_warps=min(16, max(1, block // 256)), **early_start(x.device),
    )  # fmt: skip


def _gated(x: Tensor, up: Tensor, gelu: bool) -> Tensor:
    assert x.shape == up.shape and x.dtype == up.dtype
    width = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not (count := x.numel() // width):
        return out
    x, inner, *strides = _outer(x)
    up, _, *up_strides = _outer(up)
    launch(
        _gate, (count, triton.cdiv(width, _COLUMNS)), x, up, out, width, inner, *strides,
        *up_strides, GELU=gelu, BLOCK=_COLUMNS, **early_start(x.device),
    )  # fmt: skip
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads, width, angles = x.shape[-2], x.shape[-1], cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not (count := x.numel() // width):
        return out
    assert cos.numel() // angles == count // heads
    x, _, *strides = _outer(x)
    cos, sin = cos.reshape(-1, angles), sin.reshape(-1, angles)
    launch(
        _rotate, (count,), x, cos, sin, out, width, angles, heads, *strides, cos.stride(0),
        sin.stride(0), BLOCK=triton.next_power_of_2(width), num_warps=1, **early_start(x.device),
    )  # fmt: skip
    return out


def _outer(x: Tensor) -> tuple[Tensor, int, int, int]:
    """`x` as rows: row i is member i % n of group i // n. Returns `x` (a copy if its strides have
    no such form), n, the stride of groups and that of members."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    if x.dim() == 1:
        return x, 1, 0, 0
    sizes, strides = x.shape[:-2], x.stride()[:-2]
    step, reach = 0, 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if reach > 1 and stride != step * reach:
            return _outer(x.contiguous())
        step, reach = (stride, size) if reach == 1 else (step, reach * size)
    return x, x.shape[-2], step, x.stride(-2)
