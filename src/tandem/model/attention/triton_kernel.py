"""The GPU kernel: one Triton program per tile of rows and KV head, straight from the blocks.

A decode is one tile, a prompt has several. The query heads of one KV head share a tile, so keys and
values are read once for all of them. The softmax is computed online (FlashAttention-2, arXiv
2307.08691). The keys of a long decode are divided among programs; the last of them to end merges
their results (flash-decoding, arXiv 2311.01282). Any mix of spans takes at most two launches, and
a new number of rows compiles nothing. Needs `triton`, which comes with torch's CUDA builds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.model.attention.base import AttentionBatch, AttentionParams, BatchLayout, LayerKV
from tandem.model.attention.tables import Capacity, Tables, needed, write
from tandem.model.attention.tiles import COLUMNS, PROMPT_ROWS, cut
from tandem.model.gpu.early import ask, early_start
from tandem.model.gpu.heads import store
from tandem.model.gpu.launch import launch
from tandem.model.gpu.staging import Staging

# Keys a loop step loads. Halved until they take at most `_KEY_BYTES` bytes.
_KEYS, _KEY_BYTES = 128, 16384
# Lines of a program (a line is a row of one query head): the least that matrix units take, and the
# number for prompts.
_DECODE_LINES, _PROMPT_LINES = 16, 64
# Depth of the software pipeline. The block table is loaded first, so of three stages one or two
# hold keys and values.
_STAGES = 3
# Keys whose keys and values are prefetched before a program of decodes may start.
AHEAD_KEYS = 128
# Elements of results that are merged at once.
_MERGED = 8192
# Multiprocessors that are assumed of the CPU, on which only tests compute.
_CPU_PROCESSORS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(scores, scale, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """Scores times `scale`, capped, in units of log 2."""
    if SOFTCAP:  # tanh x = 2 sigmoid(2 x) - 1
        capped = softcap * (2.0 * tl.sigmoid(2.0 * scale * scores / softcap) - 1.0)
        return capped * 1.4426950408889634
    return scores * (scale * 1.4426950408889634)


# Not specialised for values that change from pass to pass: no pass should wait for a compiler.
@triton.jit(do_not_specialize=["width", "ahead"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, keys, values, out, tiles, tables, partial, peaks, arrived,
    width, ahead, scale, window, softcap, query_row, query_head, out_row,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, MERGE: tl.constexpr,
    PRECISION: tl.constexpr, ASKS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Rows `program_id(2)` * ROWS and on of tile `program_id(0)`, for KV head `program_id(1)`."""
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    number = tl.program_id(0)
    tile = tiles + number * COLUMNS
    skipped = tl.program_id(2) * ROWS
    count = tl.minimum(tl.load(tile + 1) - skipped, ROWS)
    first_row, position = tl.load(tile) + skipped, tl.load(tile + 2) + skipped
    span = tl.load(tile + 3)
    end = position + count
    start = 0
    if WINDOW:
        start = tl.maximum(0, position - window + 1) // KEYS * KEYS
    part, used = 0, 1
    if SPLIT:
        part = tl.load(tile + 4)
        steps = tl.cdiv(end - start, KEYS)
        share = tl.maximum(tl.cdiv(steps, tl.maximum(tl.load(tile + 5), 1)), 1)
        used = tl.cdiv(steps, share)
        start += part * share * KEYS
        end = tl.minimum(end, start + share * KEYS)
    if EARLY:
        _wait(
            keys, values, tables + span * width, head, kv_heads, start,
            tl.minimum(tl.where(count > 0, end, start), start + ahead), DIM, KEYS, BLOCK, ASKS,
        )  # fmt: skip
    if count <= 0 or part >= used:
        return

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
        scores = tl.dot(q, k, input_precision=PRECISION)
        scores = _scaled(scores, scale, softcap, SOFTCAP)
        seen = key[None, :] <= at[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > at[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        # For a row that has seen no key yet, this avoids -inf - (-inf).
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(
            values + slot[:, None] + column[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        mixed = mixed * fade[:, None]
        mixed = tl.dot(weights.to(v.dtype), v, mixed, input_precision=PRECISION)
        best = peak
    total = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / total[:, None]
    if SPLIT:  # noqa: SIM102  decided when compiled
        if used > 1:
            spot = (number * kv_heads + head) * GROUP + member
            tl.store(peaks + spot, best + tl.log2(total), mask=real)
            tl.store(partial + spot[:, None] * DIM + column[None, :], mixed, mask=lines_mask)
            # All threads have stored before one of them reports its arrival.
            tl.debug_barrier()
            first = (number - part) * kv_heads + head
            if tl.atomic_add(arrived + first, 1, sem="acq_rel") == used - 1:
                tl.store(arrived + first, 0)
                to = out + first_row.to(tl.int64) * out_row + head * GROUP * DIM
                _merge(
                    partial, peaks, to, first, used, kv_heads,
                    DIM, DIM_PAD, GROUP, GROUP_PAD, MERGE,
                )  # fmt: skip
            return
    offsets = rows * out_row + heads * DIM
    where = out + offsets[:, None] + column[None, :]
    tl.store(where, mixed.to(out.dtype.element_ty), mask=lines_mask)


@triton.jit  # type: ignore[untyped-decorator]
def _wait(  # type: ignore[no-untyped-def]
    keys, values, table, head, kv_heads, start, end,
    DIM: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, ASKS: tl.constexpr,
) -> None:  # fmt: skip
    """Let the next kernel start, prefetch keys and values from `start` up to `end`, and wait.

    The last ones may not be written yet. What is written later replaces them in the L2 cache.
    """
    gdc_launch_dependents()
    if ASKS:
        each: tl.constexpr = DIM * keys.dtype.element_ty.primitive_bitwidth // 8
        first, second = keys.to(tl.int64), values.to(tl.int64)
        both = tl.where(tl.arange(0, 2) == 0, first, second)
        for begin in range(start, end, KEYS):
            key = begin + tl.arange(0, KEYS)
            there = key < end
            block = tl.load(table + key // BLOCK, mask=there, other=0).to(tl.int64)
            place = ((block * BLOCK + key % BLOCK) * kv_heads + head) * each
            ask(place[:, None] + both[None, :], tl.where(there, each, 0)[:, None])
    gdc_wait()


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    partial, peaks, to, first, used, kv_heads,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    MERGE: tl.constexpr,
) -> None:  # fmt: skip
    """Merge `used` results of one row and KV head, MERGE at a time, and store them at `to`.

    Each result is a mean of values, and the logarithm of the weights that it has. Other programs
    wrote them: they are read from the L2 cache.
    """
    member, column = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD)
    each = tl.arange(0, MERGE)
    best = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    mask = (member < GROUP)[:, None] & (column < DIM)[None, :]
    for begin in range(0, used, MERGE):
        part = begin + each
        known = (part < used)[:, None] & (member < GROUP)[None, :]
        spot = (first + part * kv_heads)[:, None] * GROUP + member[None, :]
        heights = tl.load(peaks + spot, mask=known, other=float("-inf"), cache_modifier=".cg")
        results = tl.load(
            partial + spot[:, :, None] * DIM + column[None, None, :],
            mask=known[:, :, None] & (column < DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        peak = tl.maximum(best, tl.max(heights, 0))
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weights = tl.exp2(heights - base[None, :])
        fade = tl.exp2(best - base)
        total = total * fade + tl.sum(weights, 0)
        mixed = mixed * fade[:, None] + tl.sum(results * weights[:, :, None], 0)
        best = peak
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    where = to + member[:, None] * DIM + column[None, :]
    tl.store(where, mixed.to(to.dtype.element_ty), mask=mask)


class TritonKernel:
    """For CUDA devices. Sums in float32. float32 inputs are multiplied exactly, not in TF32."""

    def __init__(self) -> None:
        interpreted: bool = triton.knobs.runtime.interpret
        self._device = torch.device("cpu" if interpreted else "cuda")
        self._processors = _CPU_PROCESSORS
        if not interpreted:
            found = torch.cuda.get_device_properties(self._device)
            self._processors = found.multi_processor_count

    @property
    def name(self) -> str:
        """Short name for `ModelInfo.kernels`."""
        return "triton"

    def prepare(self, layout: BatchLayout) -> AttentionBatch:
        """A batch for one iteration. Its tables reach the device in one copy."""
        decodes, prompts = cut(layout.starts, layout.lengths, self._processors)
        capacity = needed(layout, len(decodes), len(prompts))
        host = torch.empty(capacity.nbytes, dtype=torch.uint8)
        write(capacity.views(host), layout, decodes, prompts)
        return TritonBatch(capacity.views(host.to(layout.device)))

    def reserve(self, rows: int, spans: int, width: int) -> ReservedBatch:
        """A batch that a captured pass may read, filled anew before every replay.

        It takes any layout of at most `rows` rows, `spans` spans and `width` blocks a span. If
        `rows` equals `spans` it takes decodes only, and attends with one launch.
        """
        capacity = Capacity.reserved(rows, spans, width, self._processors)
        return ReservedBatch(capacity, self._device, self._processors)


class TritonBatch:
    """Tiles of one iteration. The output of a row that is in no tile is undefined."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        # Results of parts, by heads, KV heads and head size.
        self._parts: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def slots(self) -> Tensor:
        """Where keys and values of each row go, int64 [rows] on the device; -1: nowhere."""
        return self._tables.slots

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerKV, params: AttentionParams
    ) -> Tensor:
        """Store keys and values, then attend tile by tile."""
        store(key, value, cache, self._tables.slots)
        return self.attend_stored(query, cache, params)

    def attend_stored(self, query: Tensor, cache: LayerKV, params: AttentionParams) -> Tensor:
        """Attend, where keys and values of all rows are in `cache`. Shapes as in
        `AttentionContext`."""
        if query.stride(2) != 1:
            query = query.contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self._tables.decodes.shape[0]:
            self._launch(query, out, cache, params, split=True)
        if self._tables.prompts.shape[0]:
            self._launch(query, out, cache, params, split=False)
        return out

    def _launch(
        self, query: Tensor, out: Tensor, cache: LayerKV, params: AttentionParams, split: bool
    ) -> None:
        _, block_size, kv_heads, dim = cache.keys.shape
        group = query.shape[1] // kv_heads
        padded, dim_pad = triton.next_power_of_2(group), max(16, triton.next_power_of_2(dim))
        keys = _KEYS
        while keys > 16 and keys * dim_pad * query.element_size() > _KEY_BYTES:
            keys //= 2
        tables = self._tables
        rows = max(1, (_DECODE_LINES if split else _PROMPT_LINES) // padded)
        tiles = tables.decodes if split else tables.prompts
        parts = self._results(query, kv_heads) if split else (tiles, tiles, tiles)
        launch(
            _attend, (tiles.shape[0], kv_heads, 1 if split else triton.cdiv(PROMPT_ROWS, rows)),
            query, cache.keys, cache.values, out, tiles, tables.blocks, *parts,
            tables.blocks.shape[1], AHEAD_KEYS, params.scale, params.window, params.softcap,
            query.stride(0), query.stride(1), out.stride(0),
            DIM=dim, DIM_PAD=dim_pad, GROUP=group, GROUP_PAD=padded,
            ROWS=rows, KEYS=keys, BLOCK=block_size, COLUMNS=COLUMNS,
            WINDOW=params.window > 0, SOFTCAP=params.softcap > 0.0, SPLIT=split,
            MERGE=max(1, _MERGED // (padded * dim_pad)),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            num_warps=4 if dim_pad <= 128 and query.element_size() == 2 else 8,
            num_stages=_STAGES,
            # Prefetching needs registers, which float32 lacks, and copies of whole 16 bytes.
            ASKS=split and dim % 8 == 0 and query.element_size() == 2,
            **early_start(query.device),
        )  # fmt: skip

    def _results(self, query: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for results of parts [tiles, heads, d], the logarithms of their weights [tiles,
        heads], and how many parts have arrived [tiles, kv_heads]; the kernel leaves that at 0."""
        _, heads, dim = query.shape
        found = self._parts.get((heads, kv_heads, dim))
        if found is None:
            tiles, device = self._tables.decodes.shape[0], query.device
            found = (
                torch.empty((tiles, heads, dim), dtype=torch.float32, device=device),
                torch.empty((tiles, heads), dtype=torch.float32, device=device),
                torch.zeros((tiles, kv_heads), dtype=torch.int32, device=device),
            )
            self._parts[heads, kv_heads, dim] = found
        return found


class ReservedBatch(TritonBatch):
    """A batch whose tables keep their addresses. Until it is filled, all its rows are padding."""

    def __init__(self, capacity: Capacity, device: torch.device, processors: int) -> None:
        self._capacity = capacity
        self._processors = processors
        self._staging = Staging(capacity.nbytes, device)
        self._hosts = [capacity.views(mirror) for mirror in self._staging.mirrors]
        super().__init__(capacity.views(self._staging.device))
        self._tables.slots.fill_(-1)

    def fill(self, layout: BatchLayout) -> None:
        """Take over `layout` for the passes that follow in the stream, by one asynchronous copy.

        Rows after those of `layout` are padding. `layout.slots` is not read.
        """
        decodes, prompts = cut(layout.starts, layout.lengths, self._processors)
        spans, width = layout.tables.shape
        assert spans <= self._capacity.spans and width <= self._capacity.width
        host = self._hosts[self._staging.begin()]
        write(host, layout, decodes, prompts)
        self._staging.send(self._capacity.used(spans))
