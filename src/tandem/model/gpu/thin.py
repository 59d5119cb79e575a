"""Products of few rows with a weight, as fast as memory gives the weight.

One program multiplies a stripe of the weight, some outputs by a part of the inputs. Where outputs
alone give too few programs, several share them: each leaves its sums in a workspace, and the last
one to finish adds all in order, so equal inputs give equal bits. A program asks for its first
weights while the kernel before it still runs: memory then works on while small kernels compute.
Invariant: a workspace serves one stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.model.gpu.early import ask, early_start
from tandem.model.gpu.launch import launch

MOST_ROWS = 64
# A matrix unit's side.
_LEAST = 16
# What a program asks for before it may start. All of them together fit the second cache.
AHEAD_BYTES = 64 << 10
# Of an output's inputs, so much is asked for at once; a copy moves a multiple of 16 bytes.
_ASKED_BYTES, _LINE_BYTES = 1024, 16


@dataclass(frozen=True, slots=True)
class Stripe:
    """What a program has: `outputs` of the product, `inputs` at a time, and how it is compiled."""

    outputs: int
    inputs: int
    stages: int
    warps: int

    def tiles(self, outputs: int) -> int:
        """Programs for so many outputs, if no two share any."""
        return -(-outputs // self.outputs)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: `parts` programs share the inputs of a stripe."""

    stripe: Stripe
    parts: int = 1


class Workspace:
    """Sums of parts and a counter for each stripe, zero between launches."""

    def __init__(self, device: torch.device) -> None:
        self.partial = torch.empty(0, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)

    def reserve(self, rows: int, outputs: int, cut: Cut) -> None:
        """Room for such a product. Not while a graph that uses the workspace lives."""
        if cut.parts == 1:
            return
        if (sums := cut.parts * rows * outputs) > self.partial.numel():
            self.partial = self.partial.new_empty(sums)
        if (tiles := cut.stripe.tiles(outputs)) > self.counters.numel():
            self.counters = self.counters.new_zeros(tiles)


def padded_rows(rows: int) -> int:
    """Rows that the kernel computes for `rows` of 1 to 64: 16, 32 or 64."""
    return max(_LEAST, triton.next_power_of_2(rows))


@triton.jit  # type: ignore[untyped-decorator]
def _ask_ahead(lines, stop, PIECE: tl.constexpr, PIECES: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Ask for `stop` bytes from each of `lines` on, all lines side by side."""
    piece = tl.arange(0, PIECES) * PIECE
    for at in range(0, stop, PIECE * PIECES):
        start = (at + piece)[None, :]
        ask(lines[:, None] + start, tl.minimum(stop - start, PIECE))


# Not specialised for values that change from pass to pass or from layer to layer.
@triton.jit(do_not_specialize=["rows", "steps", "ahead", "has_bias", "has_residual"])  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x, weight, bias, residual, out, partial, counters, rows, outputs, inputs, steps, ahead,
    x_row, residual_row, has_bias, has_residual,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
    PIECE: tl.constexpr, PIECES: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Outputs of stripe `program_id(0)`, by inputs of part `program_id(1)`."""
    stripe, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    column = stripe * OUTPUTS + tl.arange(0, OUTPUTS)
    # Past the end, the last output is computed again, and not stored.
    lines = weight + tl.minimum(column, outputs - 1).to(tl.int64) * inputs
    begin = part * steps * INPUTS
    end = tl.minimum(begin + steps * INPUTS, inputs)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, INPUTS)
    if EARLY:
        each = weight.dtype.element_ty.primitive_bitwidth // 8
        stop = tl.minimum((end - begin) * each, ahead)
        _ask_ahead((lines + begin).to(tl.int64), stop, PIECE, PIECES)
        gdc_wait()
        # Only now: what begins after this finds `x` complete.
        gdc_launch_dependents()
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for at in range(begin, end, INPUTS):
        w = tl.load(
            lines[:, None] + (at + inner)[None, :],
            mask=(at + inner < inputs)[None, :],
            other=0.0,
        )
        given = tl.load(
            x + (row * x_row)[None, :] + (at + inner)[:, None],
            mask=(row < rows)[None, :] & (at + inner < inputs)[:, None],
            other=0.0,
        )
        sums = tl.dot(w, given, sums, input_precision=PRECISION)
    inside = (column < outputs)[:, None] & (row < rows)[None, :]
    to = row[None, :] * outputs + column[:, None]
    last = parts == 1
    if parts > 1:
        tl.store(partial + part * rows * outputs + to, sums, mask=inside)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        last = tl.atomic_add(counters + stripe, 1, sem="acq_rel") == parts - 1
        if last:
            sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            # Several loads at once, since one takes most of a microsecond.
            for other in tl.range(parts, loop_unroll_factor=4):
                there = partial + other * rows * outputs + to
                sums += tl.load(there, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(counters + stripe, 0)
    if last:
        if has_bias:
            sums += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[:, None]
        result = sums.to(out.dtype.element_ty)
        if has_residual:
            start = residual + (row * residual_row)[None, :] + column[:, None]
            added = tl.load(start, mask=inside, other=0.0)
            result = (added.to(tl.float32) + result.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out + to, result, mask=inside)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    cut: Cut,
    workspace: Workspace,
) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus `bias`; rounded; plus `residual`.

    1 to 64 rows, dense in their last dimension. The weight is dense. `workspace` has room for the
    product. The next kernel may begin before this one ends, but `x` is complete by then: what only
    reads `x`, and waits before it ends, may run beside the product.
    """
    rows, inputs = x.shape
    outputs, stripe = weight.shape[0], cut.stripe
    steps = -(-inputs // stripe.inputs)
    each = -(-steps // cut.parts)
    parts = -(-steps // each)
    assert parts == 1 or workspace.partial.numel() >= parts * rows * outputs
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    added = x if residual is None else residual
    start = early_start(x.device)
    ahead, pieces = _ahead(inputs * weight.element_size(), stripe)
    launch(
        _multiply, (stripe.tiles(outputs), parts), x, weight, weight if bias is None else bias,
        added, out, workspace.partial, workspace.counters, rows, outputs, inputs, each,
        ahead, x.stride(0), added.stride(0), int(bias is not None), int(residual is not None),
        ROWS=padded_rows(rows), OUTPUTS=stripe.outputs, INPUTS=stripe.inputs,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PIECE=_ASKED_BYTES // pieces, PIECES=pieces,
        num_stages=stripe.stages, num_warps=stripe.warps, **start,
    )  # fmt: skip
    return out


def _ahead(line_bytes: int, stripe: Stripe) -> tuple[int, int]:
    """Bytes of each line to ask for before the start, and how many threads share a line."""
    if line_bytes % _LINE_BYTES:
        return 0, 1
    ahead = AHEAD_BYTES // stripe.outputs // _LINE_BYTES * _LINE_BYTES
    return ahead, max(1, 32 * stripe.warps // stripe.outputs)
