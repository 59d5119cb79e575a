"""Grouped LoRA: the updates of all adapters of a pass with two launches, whatever their number.

`_shrink` makes low = x A' by tiles of rows of one adapter, split over the inputs; it may run beside
the frozen product. `_expand` sums the splits in order and adds scale * low B' to the layers'
output. Adapters keep their own tensors; a table on the device says where these are. Sums are in
float32, and the output is rounded once, after the update was added. With 16-bit weights the
low-rank product enters its second product with the 11 bits of TF32; float32 weights are multiplied
exactly. The same tiles give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.gpu.early import ask
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
# Splits of the inputs at most; `_expand` loads all at once. Fewer for the many rows of high tiles,
# to have registers enough.
_LOW_SPLITS, _HIGH_SPLITS = 8, 4


@dataclass(frozen=True, slots=True)
class Shares:
    """How work is divided among programs.

    `columns` of the output that `_expand` computes at a time, and its programs, which share them.
    `_shrink` splits the inputs while it has fewer programs than `splitting`, but not into less than
    `inputs`; it has `stages` copies in flight, may begin `beside` the frozen product, and may ask
    for B `ahead` of `_expand`.
    """

    columns: int = 128
    expanding: int = 640
    splitting: int = 1024
    inputs: int = 512
    stages: int = 4
    beside: bool = True
    ahead: bool = True


# `benchmarks.gpu.tune_adapters` compares others.
SHARES = Shares()


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """Where the adapters' matrices are. `entries` int64 [slots, groups, MEMBERS, FIELDS]; a rank
    of 0 means that the adapter leaves this layer as it is."""

    entries: Tensor
    rank: int  # the largest, at least
    overlap: bool  # a kernel may begin before the one before it has ended (from Hopper on)


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint product: its group in the table, and the outputs of its layers."""

    group: int
    widths: tuple[int, ...]


@triton.jit  # type: ignore[untyped-decorator]
def _ask_up(b, size, TYPE: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Bring this split's share of the `size` numbers at address `b` into the second cache."""
    threads, each = 128, TYPE.primitive_bitwidth // 8
    share = tl.cdiv(size, tl.num_programs(0) * threads * 8) * 8
    start = (tl.program_id(0) * threads + tl.arange(0, 128)) * share
    ask(b + start.to(tl.int64) * each, tl.minimum(size - start, share) * each)


# `group` differs from layer to layer: it must not make variants of its own.
@triton.jit(do_not_specialize=["group", "groups"])  # type: ignore[untyped-decorator]
def _shrink(  # type: ignore[no-untyped-def]
    x, low, tiles, entries, groups, group, inputs, chunk, x_row, bound, first, second, third,
    HEIGHT: tl.constexpr, INPUTS: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr, SETTLED: tl.constexpr, AHEAD: tl.constexpr,
) -> None:  # fmt: skip
    """Split `program_id(0)` of tile `program_id(1)`; `program_id(2)` is a member and some ranks.
    `low` [rows, splits, members, bound]. With `SETTLED`, `x` is complete when this begins. With
    `AHEAD`, a program asks for its share of the member's B as well."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tiles + tl.program_id(1) * 4
    first_row, count, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count == 0 and tl.program_id(1) > 0:
        return  # only if others wait below: the kernel after this one relies on all before it
    part, member = tl.program_id(0), tl.program_id(2) % COUNT
    start_rank = tl.program_id(2) // COUNT * RANKS
    entry = entries + ((slot.to(tl.int64) * groups + group) * 3 + member) * 4
    rank = tl.multiple_of(tl.load(entry + 2).to(tl.int32), 8)
    a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
    a = tl.multiple_of(a, 16)
    if OVERLAP and not SETTLED:
        tl.extra.cuda.gdc_wait()
    if count > 0 and start_rank < rank:
        line, ranks = tl.arange(0, HEIGHT), start_rank + tl.arange(0, RANKS)
        real, known = line < count, ranks < rank
        rows = (first_row + line).to(tl.int64)
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
        if AHEAD and start_rank == 0:
            width = tl.where(member == 0, first, tl.where(member == 1, second, third))
            _ask_up(tl.load(entry + 1), width * rank, x.dtype.element_ty)
    if OVERLAP and SETTLED:
        tl.extra.cuda.gdc_wait()  # this kernel ends after all before it


@triton.jit  # type: ignore[untyped-decorator]
def _place(  # type: ignore[no-untyped-def]
    block, first, second, third, COLUMNS: tl.constexpr, COUNT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Of a block of columns: its member, its first column of the member's, the member's first of
    all, and the member's width. No block is of two members."""
    member, origin, width = 0, 0, first
    if COUNT > 1 and block >= tl.cdiv(first, COLUMNS):
        block -= tl.cdiv(first, COLUMNS)
        member, origin, width = 1, first, second
        if COUNT > 2 and block >= tl.cdiv(second, COLUMNS):
            block -= tl.cdiv(second, COLUMNS)
            member, origin, width = 2, first + second, third
    return member, block * COLUMNS, origin, width


@triton.jit  # type: ignore[untyped-decorator]
def _load_up(  # type: ignore[no-untyped-def]
    entry, block, first, second, third, columns, ranks,
    TYPE: tl.constexpr, COLUMNS: tl.constexpr, COUNT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A block of columns of B [columns, ranks]; zeros past the last block."""
    member, own, _, width = _place(block, first, second, third, COLUMNS, COUNT)
    rank = tl.multiple_of(tl.load(entry + member * 4 + 2).to(tl.int32), 8)
    b = tl.multiple_of(tl.load(entry + member * 4 + 1).to(tl.pointer_type(TYPE)), 16)
    mask = (columns < width - own)[:, None] & (ranks < rank)[None, :]
    return tl.load(
        b + own * rank + (columns[:, None] * rank + ranks[None, :]), mask=mask, other=0.0
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_product(  # type: ignore[no-untyped-def]
    start, block, out_row, first, second, third, line, columns, real,
    COLUMNS: tl.constexpr, COUNT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A block of columns of the rows at `start`, which the frozen product left there."""
    _, own, origin, width = _place(block, first, second, third, COLUMNS, COUNT)
    mask = real & (columns < width - own)[None, :]
    return tl.load(
        start + (origin + own) + line[:, None] * out_row + columns[None, :], mask=mask, other=0.0
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_low(low, mask, step, SPLITS: tl.constexpr) -> tl.tensor:  # type: ignore[no-untyped-def]
    """The low-rank product at `low`: the sum of its splits, `step` apart, in their order."""
    total = tl.load(low, mask=mask, other=0.0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(low + part * step, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["group", "groups"])  # type: ignore[untyped-decorator]
def _expand(  # type: ignore[no-untyped-def]
    low, out, tiles, entries, groups, group, bound, out_row, first, second, third,
    HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Tiles in use share the programs evenly. A program has every so-many-th block of its tile's
    columns, and asks for the next block's B and product before it computes one. Members are
    `first`, `second` and `third` columns wide."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    blocks = tl.cdiv(first, COLUMNS) + tl.cdiv(second, COLUMNS) + tl.cdiv(third, COLUMNS)
    used = tl.load(tiles + 3)
    sharing = tl.minimum(tl.num_programs(0) // tl.maximum(used, 1), blocks)
    tile = tl.program_id(0) // sharing
    if tile >= used and tile > 0:
        return  # others wait below: the kernel after this one relies on all before it
    first_row, count = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    slot = tl.load(tiles + tile * 4 + 2).to(tl.int64)
    entry = entries + (slot * groups + group) * 12
    line, ranks, columns = tl.arange(0, HEIGHT), tl.arange(0, RANKS), tl.arange(0, COLUMNS)
    row, real = first_row.to(tl.int64), (line < count)[:, None]
    begin = tl.where(count > 0, tl.program_id(0) % sharing, blocks)
    # The adapters' matrices, unlike `low` and `out`, are not of the kernels just before.
    up = _load_up(
        entry, begin, first, second, third, columns, ranks, out.dtype.element_ty, COLUMNS, COUNT
    )
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    start = out + row * out_row
    # Of high tiles, the next block's product would take too many registers.
    product = tl.zeros([HEIGHT, COLUMNS], out.dtype.element_ty)
    if HEIGHT == 16:
        product = _load_product(start, begin, out_row, first, second, third, line, columns, real,
                                COLUMNS, COUNT)  # fmt: skip
    known, rank = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    scale = tl.full((), 0.0, tl.float32)
    total = tl.zeros([HEIGHT, RANKS], tl.float32)
    for block in range(begin, blocks, sharing):
        after = _load_up(
            entry, block + sharing, first, second, third, columns, ranks, out.dtype.element_ty,
            COLUMNS, COUNT,
        )  # fmt: skip
        asked = block + sharing if HEIGHT == 16 else block
        later = _load_product(start, asked, out_row, first, second, third, line, columns, real,
                              COLUMNS, COUNT)  # fmt: skip
        if HEIGHT > 16:
            product = later
        member, own, origin, width = _place(block, first, second, third, COLUMNS, COUNT)
        lows = low + (row * (SPLITS * COUNT) + member) * bound
        lows += line[:, None] * (SPLITS * COUNT * bound) + ranks[None, :]
        if HEIGHT > 16 or known != member:
            known = known * 0 + member
            rank = tl.load(entry + member * 4 + 2).to(tl.int32)
            scale = tl.load(entry + member * 4 + 3).to(tl.int32).to(tl.float32, bitcast=True)
            total = _load_low(lows, real & (ranks < rank)[None, :], COUNT * bound, SPLITS)
        if rank > 0:
            update = tl.dot(total, tl.trans(up.to(tl.float32)), input_precision=PRECISION)
            for more in range(RANKS, rank, RANKS):
                others = more + ranks
                rest = _load_low(
                    lows + more, real & (others < rank)[None, :], COUNT * bound, SPLITS
                )
                other = _load_up(
                    entry, block, first, second, third, columns, others, out.dtype.element_ty,
                    COLUMNS, COUNT,
                ).to(tl.float32)  # fmt: skip
                update = tl.dot(rest, tl.trans(other), update, input_precision=PRECISION)
            update = update * scale + product.to(tl.float32)
            places = start + (origin + own) + line[:, None] * out_row + columns[None, :]
            mask = real & (columns < width - own)[None, :]
            tl.store(places, update.to(out.dtype.element_ty), mask=mask)
        up, product = after, later


def add_updates(
    x: Tensor, out: Tensor, tiles: Tiles, table: AdapterTable, joint: Joint, *, settled: bool
) -> None:
    """Add the updates of `joint` to the rows of `tiles`: `x` [rows, in], `out` [rows, sum of
    widths], columns consecutive. `settled`: see `JointUpdate`."""
    entries, count, places = table.entries, len(joint.widths), tiles.table.shape[0]
    shares, (rows, inputs), groups = SHARES, x.shape, entries.shape[1]
    assert x.stride(1) == out.stride(1) == 1 and x.dtype == out.dtype
    ranks = min(table.rank, _RANKS)
    step = 128 if tiles.height * ranks <= 1024 else 64
    splits = _splits(places * count, inputs, tiles.height, shares)
    chunk = triton.cdiv(triton.cdiv(inputs, splits), step) * step
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    widths = *joint.widths, *[0] * (MEMBERS - count)
    low = torch.empty((rows, splits, count, table.rank), dtype=torch.float32, device=x.device)
    launch(
        _shrink, (splits, places, count * (table.rank // ranks)),
        x, low, tiles.table, entries, groups, joint.group, inputs, chunk, x.stride(0), table.rank,
        *widths, HEIGHT=tiles.height, INPUTS=step, RANKS=ranks, COUNT=count,
        PRECISION=precision, OVERLAP=table.overlap, SETTLED=settled and shares.beside,
        AHEAD=table.overlap and shares.ahead and tiles.height == 16,
        launch_pdl=table.overlap, num_warps=4, num_stages=shares.stages,
    )  # fmt: skip
    blocks = sum(triton.cdiv(width, shares.columns) for width in joint.widths)
    launch(
        _expand, (max(places, min(shares.expanding, places * blocks)),),
        low, out, tiles.table, entries, groups, joint.group, table.rank, out.stride(0), *widths,
        HEIGHT=tiles.height, COLUMNS=shares.columns, RANKS=ranks, COUNT=count, SPLITS=splits,
        PRECISION=precision, OVERLAP=table.overlap, launch_pdl=table.overlap,
        num_warps=4 if tiles.height == 16 else 8, num_stages=1,
    )  # fmt: skip


def _splits(programs: int, inputs: int, height: int, shares: Shares) -> int:
    """A power of two, so that few variants of `_expand` exist."""
    most = _LOW_SPLITS if height == 16 else _HIGH_SPLITS
    most = min(most, inputs // shares.inputs, shares.splitting // programs)
    return 1 << max(0, most.bit_length() - 1)
