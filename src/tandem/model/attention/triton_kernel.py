"""The GPU kernel: one Triton program per tile of rows and KV head, straight from the blocks.

A decode is one tile, a prompt has several. The query heads of one KV head share a tile, so keys and
values are read once for all of them. The softmax is computed online (FlashAttention-2, arXiv
2307.08691). Any mix of spans takes at most two launches, and a new number of rows compiles nothing.
Needs `triton`, which comes with torch's CUDA builds.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.attention.base import AttentionBatch, AttentionParams, BatchLayout, LayerKV
from tandem.model.attention.tiles import cut

# Keys of a tile; halved while they take more bytes than this.
_KEYS, _KEY_BYTES = 128, 16384


# Not specialised for values that change from pass to pass: no pass should wait for a compiler.
@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, out, tiles, tables, width, scale, window, softcap,
    query_row, query_head, out_row,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Tile `program_id(0)` of KV head `program_id(1)`; `tiles` is the table of `Tiles`."""
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    tile = tiles + tl.program_id(0) * 4
    first_row, count = tl.load(tile), tl.load(tile + 1)
    position, span = tl.load(tile + 2), tl.load(tile + 3)

    line = tl.arange(0, ROWS * GROUP_PAD)
    row, member = line // GROUP_PAD, line % GROUP_PAD
    real = (row < count) & (member < GROUP)
    column = tl.arange(0, DIM_PAD)
    inside = column < DIM
    heads = (head * GROUP + member).to(tl.int64)
    rows = (first_row + row).to(tl.int64)
    offsets = rows * query_row + heads * query_head
    lines_mask = real[:, None] & inside[None, :]
    q = tl.load(query + offsets[:, None] + column[None, :], mask=lines_mask, other=0.0)

    best = tl.full([ROWS * GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * GROUP_PAD], tl.float32)
    mixed = tl.zeros([ROWS * GROUP_PAD, DIM_PAD], tl.float32)
    at = position + row
    end = position + count
    start = 0
    if WINDOW:
        start = tl.maximum(0, position - window + 1) // KEYS * KEYS
    for begin in range(start, end, KEYS):
        key = begin + tl.arange(0, KEYS)
        there = key < end
        block = tl.load(tables + span * width + key // BLOCK, mask=there, other=0).to(tl.int64)
        slot = ((block * BLOCK + key % BLOCK) * kv_heads + head) * DIM
        k = tl.load(
            keys + slot[None, :] + column[:, None],
            mask=there[None, :] & inside[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if SOFTCAP:  # tanh x = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        seen = key[None, :] <= at[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        # For a row that has seen no key yet, this avoids -inf - (-inf).
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp(scores - base[:, None])
        fade = tl.exp(best - base)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(
            values + slot[:, None] + column[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        mixed = mixed * fade[:, None]
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
        best = peak
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    offsets = rows * out_row + heads * DIM
    tl.store(
        out + offsets[:, None] + column[None, :],
        mixed.to(out.dtype.element_ty),
        mask=lines_mask,
    )


class TritonKernel:
    """For CUDA devices. Sums in float32. float32 inputs are multiplied exactly, not in TF32."""

    @property
    def name(self) -> str:
        """Short name for `ModelInfo.kernels`."""
        return "triton"

    def prepare(self, layout: BatchLayout) -> AttentionBatch:
        """Tiles are cut at the first layer, which tells how many query heads share a KV head."""
        return TritonBatch(layout)


class TritonBatch:
    """Tiles of one iteration, by the number of query heads per KV head."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._blocks = torch.from_numpy(layout.tables).to(layout.device)
        # (most rows of a tile, tiles on the device), by padded number of heads
        self._tiles: dict[int, list[tuple[int, Tensor]]] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerKV, params: AttentionParams
    ) -> Tensor:
        """Store keys and values, then attend tile by tile."""
        cache.keys.flatten(0, 1).index_copy_(0, self._layout.slots, key)
        cache.values.flatten(0, 1).index_copy_(0, self._layout.slots, value)
        group = query.shape[1] // key.shape[1]
        padded = triton.next_power_of_2(group)
        tiles = self._tiles.get(padded)
        if tiles is None:
            found, device = cut(self._layout.starts, self._layout.lengths, padded), query.device
            tiles = [(each.rows, torch.from_numpy(each.table).to(device)) for each in found]
            self._tiles[padded] = tiles
        if query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for rows, table in tiles:
            self._launch(rows, table, query, out, cache, params, padded)
        return out

    def _launch(
        self,
        rows: int,
        tiles: Tensor,
        query: Tensor,
        out: Tensor,
        cache: LayerKV,
        params: AttentionParams,
        padded: int,
    ) -> None:
        _, block_size, kv_heads, dim = cache.keys.shape
        dim_pad = max(16, triton.next_power_of_2(dim))
        keys = _KEYS
        while keys > 16 and keys * dim_pad * query.element_size() > _KEY_BYTES:
            keys //= 2
        launch: Any = _attend[(tiles.shape[0], kv_heads)]
        launch(
            query, cache.keys, cache.values, out, tiles, self._blocks, self._blocks.shape[1],
            params.scale, params.window, params.softcap,
            query.stride(0), query.stride(1), out.stride(0),
            DIM=dim, DIM_PAD=dim_pad, GROUP=query.shape[1] // kv_heads, GROUP_PAD=padded,
            ROWS=rows, KEYS=keys, BLOCK=block_size,
            WINDOW=params.window > 0, SOFTCAP=params.softcap > 0.0,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        )  # fmt: skip
