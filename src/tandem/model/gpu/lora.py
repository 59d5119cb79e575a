"""Grouped LoRA: the updates of all adapters of a pass with two launches, whatever their number.

`_shrink` makes low = x A' by tiles of rows of one adapter, split over the inputs; `_expand` sums
the splits in order and adds scale * low B' to the layers' output. Adapters keep their own tensors;
a table on the device says where these are. Sums are in float32, and the output is rounded once,
after the update was added. With 16-bit weights the low-rank product enters its second product with
the 11 bits of TF32; float32 weights are multiplied exactly. The same tiles give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.gpu.launch import launch
from tandem.model.lora import Tiles

MEMBERS = 3
"""Most layers of a joint product: queries, keys and values."""
FIELDS = 4
"""Of a table's entry: addresses of A and B, rank, scale (the bits of a float32)."""
RANK_STEP = 8
"""Ranks in a table are multiples of this, and matrices begin at multiples of 16 bytes, so that
loads may be wide."""
# Ranks that a program computes together, at most.
_RANKS = 32
# Columns of the output that a program of `_expand` computes.
_COLUMNS = 128
# Inputs are split while programs are few: at least so many inputs a split, so many splits at most,
# which `_expand` loads at once (fewer for the many rows of high tiles, to have registers enough).
_INPUTS, _LOW_SPLITS, _HIGH_SPLITS, _PROGRAMS = 512, 16, 4, 1024


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """Where the adapters' matrices are. `entries` int64 [slots, groups, MEMBERS, FIELDS]; a rank
    of 0 means that the adapter leaves this layer as it is."""

    entries: Tensor
    rank: int  # the largest, at least
    overlap: bool  # a kernel may begin before the one before it has ended (from Hopper on)


# `group` differs from layer to layer: it must not make variants of its own.
@triton.jit(do_not_specialize=["group", "groups"])  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x, low, tiles, entries, groups, group, inputs, chunk, x_row, bound,
    HEIGHT: tl.constexpr, INPUTS: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Split `program_id(0)` of tile `program_id(1)`; `program_id(2)` is a member and some ranks.
    `low` [rows, splits, members, bound]."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tiles + tl.program_id(1) * 4
    first, count, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count == 0 and tl.program_id(1) > 0:
        return  # only if others wait below: the kernel after this one relies on all before it
    part, member = tl.program_id(0), tl.program_id(2) % COUNT
    start_rank = tl.program_id(2) // COUNT * RANKS
    entry = entries + ((slot.to(tl.int64) * groups + group) * 3 + member) * 4
    rank = tl.multiple_of(tl.load(entry + 2).to(tl.int32), 8)
    a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
    a = tl.multiple_of(a, 16)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if count > 0 and start_rank < rank:
        line, ranks = tl.arange(0, HEIGHT), start_rank + tl.arange(0, RANKS)
        real, known = line < count, ranks < rank
        rows = (first + line).to(tl.int64)
        begin = part * chunk
        total = tl.zeros([HEIGHT, RANKS], tl.float32)
        for start in range(begin, tl.minimum(begin + chunk, inputs), INPUTS):
            column = start + tl.arange(0, INPUTS)
            inside = column < inputs
            some = tl.load(
                x + rows[:, None] * x_row + column[None, :],
                mask=real[:, None] & inside[None, :],
                other=0.0,
            )
            down = tl.load(
                a + ranks[:, None] * inputs + column[None, :],
                mask=known[:, None] & inside[None, :],
                other=0.0,
            )
            total = tl.dot(some, tl.trans(down), total, input_precision=PRECISION)
        place = (rows * tl.num_programs(0) + part) * COUNT + member
        tl.store(
            low + place[:, None] * bound + ranks[None, :],
            total,
            mask=real[:, None] & known[None, :],
        )


@triton.jit(do_not_specialize=["group", "groups"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    low, out, tiles, entries, groups, group, bound, out_row, first_width, second_width, third_width,
    HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Columns `program_id(0)` of tile `program_id(1)`; no program's columns are of two members."""
    tile = tiles + tl.program_id(1) * 4
    first, count, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count == 0 and tl.program_id(1) > 0:
        return
    block = tl.program_id(0)
    member, origin, width = 0, 0, first_width
    if COUNT > 1 and block >= tl.cdiv(first_width, COLUMNS):
        block -= tl.cdiv(first_width, COLUMNS)
        member, origin, width = 1, first_width, second_width
        if COUNT > 2 and block >= tl.cdiv(second_width, COLUMNS):
            block -= tl.cdiv(second_width, COLUMNS)
            member, origin, width = 2, first_width + second_width, third_width
    entry = entries + ((slot.to(tl.int64) * groups + group) * 3 + member) * 4
    rank = tl.multiple_of(tl.load(entry + 2).to(tl.int32), 8)
    rank = tl.where(count > 0, rank, 0)
    rank = tl.multiple_of(rank, 8)
    b = tl.load(entry + 1).to(tl.pointer_type(out.dtype.element_ty))
    b = tl.multiple_of(b, 16)
    scale = tl.load(entry + 3).to(tl.int32).to(tl.float32, bitcast=True)

    ranks = tl.arange(0, RANKS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    ups = b + column[:, None] * rank + ranks[None, :]
    # The adapters' matrices, unlike `low` and `out`, are not of the kernels just before.
    up = tl.load(ups, mask=inside[:, None] & (ranks < rank)[None, :], other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if rank > 0:
        line = tl.arange(0, HEIGHT)
        real = line < count
        rows = (first + line).to(tl.int64)
        places = out + rows[:, None] * out_row + (origin + column)[None, :]
        mask = real[:, None] & inside[None, :]
        product = tl.load(places, mask=mask, other=0.0)
        update = tl.zeros([HEIGHT, COLUMNS], tl.float32)
        for start in range(0, rank, RANKS):
            known = real[:, None] & (start + ranks < rank)[None, :]
            total = tl.zeros([HEIGHT, RANKS], tl.float32)
            for part in tl.static_range(SPLITS):
                place = (rows * SPLITS + part) * COUNT + member
                total += tl.load(
                    low + place[:, None] * bound + (start + ranks)[None, :], mask=known, other=0.0
                )
            update = tl.dot(
                total * scale, tl.trans(up.to(tl.float32)), update, input_precision=PRECISION
            )
            left = (start + RANKS + ranks < rank)[None, :]
            up = tl.load(ups + start + RANKS, mask=inside[:, None] & left, other=0.0)
        update += product.to(tl.float32)
        tl.store(places, update.to(out.dtype.element_ty), mask=mask)


def add_updates(
    x: Tensor, out: Tensor, tiles: Tiles, table: AdapterTable, group: int, widths: tuple[int, ...]
) -> None:
    """Add the updates of joint group `group`, whose layers have `widths` outputs, to the rows of
    `tiles`: `x` [rows, in], `out` [rows, sum of widths], columns consecutive."""
    entries, count, places = table.entries, len(widths), tiles.table.shape[0]
    (rows, inputs), groups = x.shape, entries.shape[1]
    assert x.stride(1) == out.stride(1) == 1 and x.dtype == out.dtype
    ranks = min(table.rank, _RANKS)
    step = 128 if tiles.height * ranks <= 1024 else 64
    splits = _splits(places * count, inputs, tiles.height)
    chunk = triton.cdiv(triton.cdiv(inputs, splits), step) * step
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    low = torch.empty((rows, splits, count, table.rank), dtype=torch.float32, device=x.device)
    launch(
        _shrink, (splits, places, count * (table.rank // ranks)),
        x, low, tiles.table, entries, groups, group, inputs, chunk, x.stride(0), table.rank,
        HEIGHT=tiles.height, INPUTS=step, RANKS=ranks, COUNT=count,
        PRECISION=precision, OVERLAP=table.overlap, launch_pdl=table.overlap,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    blocks = sum(triton.cdiv(width, _COLUMNS) for width in widths)
    launch(
        _expand, (blocks, places),
        low, out, tiles.table, entries, groups, group, table.rank, out.stride(0),
        *widths, *[0] * (MEMBERS - count),
        HEIGHT=tiles.height, COLUMNS=_COLUMNS, RANKS=ranks, COUNT=count, SPLITS=splits,
        PRECISION=precision, OVERLAP=table.overlap, launch_pdl=table.overlap,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _splits(programs: int, inputs: int, height: int) -> int:
    """A power of two, so that few variants of `_expand` exist."""
    most = _LOW_SPLITS if height == 16 else _HIGH_SPLITS
    most = min(most, inputs // _INPUTS, _PROGRAMS // programs)
    return 1 << max(0, most.bit_length() - 1)
