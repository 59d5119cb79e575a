"""The reference kernel: torch's scaled dot product attention over gathered blocks, any device.

Rows are grouped so that one call serves many sequences: decode rows in buckets of similar context
length (padding at most about doubles the work), and prompt spans of equal start and length. Groups,
masks and indices depend only on the window, so all layers share them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.model.attention.base import AttentionBatch, AttentionParams, BatchLayout, LayerKV

# Contexts of up to this many blocks share a bucket: another call would cost more than padding.
_SMALL_BLOCKS = 8

Rows = slice | Tensor


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans computed by one call."""

    count: int  # number of spans
    length: int  # rows of each
    rows: Rows
    context: int  # keys of each span that count
    blocks: Tensor | None  # int64 [count * width], gathered as keys; None: the rows' own keys
    bias: Tensor | None  # Added to the scores, [count or 1, 1, 1 or length, context]; None: causal.


class SdpaKernel:
    """Attention with torch alone, on any device."""

    @property
    def name(self) -> str:
        """Short name for `ModelInfo.kernels`."""
        return "sdpa"

    def prepare(self, layout: BatchLayout) -> AttentionBatch:
        """Groups are built when a layer first uses a window."""
        return SdpaBatch(layout)

    def reserve(self, rows: int, spans: int, width: int) -> None:
        """See `AttentionKernel`."""


class SdpaBatch:
    """Groups of one iteration, per window."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._groups: dict[int, list[_Group]] = {}

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerKV, params: AttentionParams
    ) -> Tensor:
        """Store keys and values, then attend group by group."""
        cache.keys.flatten(0, 1).index_copy_(0, self._layout.slots, key)
        cache.values.flatten(0, 1).index_copy_(0, self._layout.slots, value)
        groups = self._groups.get(params.window)
        if groups is None:
            groups = _build_groups(self._layout, params.window)
            self._groups[params.window] = groups
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in groups:
            out[group.rows] = _attend_group(group, query, key, value, cache, params)
        return out


def _attend_group(
    group: _Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerKV,
    params: AttentionParams,
) -> Tensor:
    """[count * length, heads, d]. With length 1, query heads of one KV head become rows."""
    _, heads, dim = query.shape
    kv_heads = key.shape[1]
    if group.blocks is None:
        keys, values = (
            rows[group.rows].view(group.count, group.length, kv_heads, dim).transpose(1, 2)
            for rows in (key, value)
        )
    else:
        keys, values = (
            store.index_select(0, group.blocks)
            .view(group.count, -1, kv_heads, dim)[:, : group.context]
            .transpose(1, 2)
            for store in (cache.keys, cache.values)
        )
    picked = query[group.rows]
    if group.length == 1:
        folded = picked.reshape(group.count, kv_heads, heads // kv_heads, dim)
        return dot_product(folded, keys, values, group.bias, params).reshape(-1, heads, dim)
    spans = picked.reshape(group.count, group.length, heads, dim).transpose(1, 2)
    mixed = dot_product(spans, keys, values, group.bias, params)
    return mixed.transpose(1, 2).reshape(-1, heads, dim)


def dot_product(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attention of [n, heads, length, d] over [n, kv_heads, context, d]; causal without `bias`."""
    grouped = query.shape[1] != keys.shape[1]
    if params.softcap:
        return _soft_capped(query, keys, values, bias, params)
    if grouped and bias is not None and query.device.type != "cpu":
        # Only the CPU's fused kernel supports a bias together with grouped heads.
        keys, values = _repeat_heads(query, keys), _repeat_heads(query, values)
        grouped = False
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=bias,
        is_causal=bias is None,
        scale=params.scale,
        enable_gqa=grouped,
    )


def _soft_capped(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, params: AttentionParams
) -> Tensor:
    """The plain formula, since torch has no fused kernel with a soft cap."""
    keys, values = _repeat_heads(query, keys), _repeat_heads(query, values)
    scores = torch.matmul(query, keys.transpose(-1, -2)) * params.scale
    scores = torch.tanh(scores / params.softcap) * params.softcap
    if bias is None:
        length = query.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    else:
        scores = scores + bias
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)


def _repeat_heads(query: Tensor, keys: Tensor) -> Tensor:
    return keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)


def _build_groups(layout: BatchLayout, window: int) -> list[_Group]:
    ends = layout.starts + layout.lengths
    first_rows = np.cumsum(layout.lengths) - layout.lengths
    # The block of the oldest key that the first row of each span may see.
    oldest = np.maximum(layout.starts - window + 1, 0) if window else np.zeros_like(ends)
    first_blocks = oldest // layout.block_size
    num_blocks = -(-ends // layout.block_size) - first_blocks
    builder = _GroupBuilder(layout, window, first_rows, first_blocks, num_blocks)
    decode = np.flatnonzero(layout.lengths == 1)
    groups = [builder.decode_group(bucket) for bucket in _buckets(decode, num_blocks)]
    equal: dict[tuple[int, int], list[int]] = {}
    for span in np.flatnonzero(layout.lengths > 1).tolist():
        key = (int(layout.starts[span]), int(layout.lengths[span]))
        equal.setdefault(key, []).append(span)
    groups.extend(builder.prompt_group(np.array(spans)) for spans in equal.values())
    return groups


def _buckets(spans: np.ndarray, num_blocks: np.ndarray) -> list[np.ndarray]:
    """Split spans so that a bucket's longest has at most about twice the blocks of its shortest."""
    if spans.size == 0:
        return []
    sizes = np.maximum(num_blocks[spans], _SMALL_BLOCKS)
    classes = np.ceil(np.log2(sizes)).astype(np.int64)
    return [spans[classes == kind] for kind in np.unique(classes)]


@dataclass(frozen=True, slots=True)
class _GroupBuilder:
    layout: BatchLayout
    window: int
    first_rows: np.ndarray
    first_blocks: np.ndarray
    num_blocks: np.ndarray

    def decode_group(self, spans: np.ndarray) -> _Group:
        width = int(self.num_blocks[spans].max())
        position = self.layout.starts[spans, None]
        first = self.first_blocks[spans, None]
        key = first * self.layout.block_size + np.arange(width * self.layout.block_size)
        seen = key <= position
        if self.window:
            seen &= key > position - self.window
        return _Group(
            count=spans.size,
            length=1,
            rows=self._rows(self.first_rows[spans]),
            context=width * self.layout.block_size,
            blocks=self._gathered(spans, width),
            bias=self._bias(seen[:, None, None, :]),
        )

    def prompt_group(self, spans: np.ndarray) -> _Group:
        """Spans of equal start and length. A first chunk needs no gather, and usually no bias."""
        start, length = int(self.layout.starts[spans[0]]), int(self.layout.lengths[spans[0]])
        rows = self._rows((self.first_rows[spans, None] + np.arange(length)).reshape(-1))
        if start == 0 and (not self.window or length <= self.window):
            return _Group(spans.size, length, rows, length, None, None)
        first = int(self.first_blocks[spans[0]]) * self.layout.block_size
        query = np.arange(start, start + length)[:, None]
        key = np.arange(first, start + length)[None, :]
        seen = key <= query
        if self.window:
            seen &= key > query - self.window
        blocks = self._gathered(spans, int(self.num_blocks[spans[0]])) if start else None
        context = start + length - first
        return _Group(spans.size, length, rows, context, blocks, self._bias(seen[None, None]))

    def _gathered(self, spans: np.ndarray, width: int) -> Tensor:
        """Block numbers [spans * width]. Entries after a span's own blocks are masked later."""
        columns = self.first_blocks[spans, None] + np.arange(width)
        columns = np.minimum(columns, self.layout.tables.shape[1] - 1)
        blocks = self.layout.tables[spans[:, None], columns].astype(np.int64)
        return torch.from_numpy(blocks.reshape(-1)).to(self.layout.device)

    def _bias(self, seen: np.ndarray) -> Tensor:
        visible = torch.from_numpy(seen).to(self.layout.device)
        bias = torch.zeros(seen.shape, dtype=self.layout.dtype, device=self.layout.device)
        return bias.masked_fill_(~visible, -torch.inf)

    def _rows(self, rows: np.ndarray) -> Rows:
        """A slice if the rows are consecutive, so that selecting them copies nothing."""
        if rows[-1] - rows[0] + 1 == rows.size and (np.diff(rows) == 1).all():
            return slice(int(rows[0]), int(rows[-1]) + 1)
        return torch.from_numpy(rows.astype(np.int64)).to(self.layout.device)
