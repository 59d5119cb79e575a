"""The seam between a model's attention layers and a kernel that knows where their KV is.

A forward pass carries one `AttentionContext` through the model's keyword arguments. Every layer
calls it with its own queries, keys and values. Kernels turn a `BatchLayout` into an
`AttentionBatch` once per iteration, so all layers share masks and indices. Invariant: rows are
tokens, and no kernel loops over tokens in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.model.kernels.layer import Exports


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """A layer's parameters: score factor, window in tokens (0: none), soft cap (0: none)."""

    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's cached keys and values: [tokens, kv_heads, head_dim] each."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's cache: `keys` and `values` are [num_blocks, block_size, kv_heads, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class SpanArrays:
    """Spans in row order: first positions and lengths int64 [spans]; block tables int32 [spans,
    width], padded with each span's first block."""

    starts: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray

    def positions(self) -> np.ndarray:
        """Of each row, int64 [rows]."""
        first_rows = np.cumsum(self.lengths) - self.lengths
        offsets = np.repeat(self.starts - first_rows, self.lengths)
        return np.arange(offsets.size) + offsets

    def slots(self, block_size: int) -> np.ndarray:
        """Where each row's KV goes: block * block_size + offset, int64 [rows]."""
        positions = self.positions()
        owner = np.repeat(np.arange(self.lengths.size), self.lengths)
        blocks = self.tables[owner, positions // block_size].astype(np.int64)
        return blocks * block_size + positions % block_size


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the rows of a flattened batch come from and where their KV goes.

    Span s has `lengths[s]` consecutive rows from position `starts[s]` on. `tables` int32 [spans,
    width] lists its blocks, padded with its first block. `slots` int64 [rows], on the device, is
    block * block_size + offset of each row.
    """

    starts: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray
    slots: Tensor
    block_size: int
    device: torch.device
    dtype: torch.dtype

    @staticmethod
    def build(
        spans: SpanArrays, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[BatchLayout, Tensor]:
        """The layout of `spans` and their positions, int64 [rows] on the device."""
        slots = torch.from_numpy(spans.slots(block_size)).to(device)
        layout = BatchLayout(
            spans.starts, spans.lengths, spans.tables, slots, block_size, device, dtype
        )
        return layout, torch.from_numpy(spans.positions()).to(device)


class AttentionContext(Protocol):
    """What a layer's attention calls during one forward pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """Causal attention of `query` [rows, heads, d] over its sequence; returns the same shape.

        `key` and `value` are [rows, kv_heads, d], of the same rows and rotated already.
        """
        ...


class AttentionBatch(Protocol):
    """Metadata of one iteration, prepared for one kernel."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerKV, params: AttentionParams
    ) -> Tensor:
        """Store `key` and `value` in `cache`, then attend. Shapes as in `AttentionContext`."""
        ...


class ReservedAttention(AttentionBatch, Protocol):
    """A batch whose tables keep their place: what a captured pass reads."""

    def fill(self, layout: BatchLayout) -> None:
        """Take over `layout`, which is on the host, for passes that are given to the device from
        now on. Rows after those of `layout` are padding: stored nowhere, with any result."""
        ...


class AttentionKernel(Protocol):
    """A way to compute paged attention. Stateless; chosen once at load."""

    @property
    def name(self) -> str:
        """Short name for `ModelInfo.kernels`."""
        ...

    def prepare(self, layout: BatchLayout) -> AttentionBatch:
        """Build what all layers of this iteration share."""
        ...

    def reserve(self, rows: int, spans: int, width: int) -> ReservedAttention | None:
        """A batch for captured passes of at most `rows` rows, `spans` spans and `width` blocks a
        span; if `rows` equals `spans`, of decodes only. None if passes cannot be captured."""
        ...


def attend_once(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype) -> None:
    """Attend with one row of zeros. Raises any error of a kernel that does not work on `device`."""
    nothing = np.zeros(1, dtype=np.int64)
    spans = SpanArrays(nothing, nothing + 1, np.zeros((1, 1), dtype=np.int32))
    layout, _ = BatchLayout.build(spans, 16, device, dtype)
    row = torch.zeros((1, 1, 16), dtype=dtype, device=device)
    cache = LayerKV(*(torch.zeros((1, 16, 1, 16), dtype=dtype, device=device) for _ in range(2)))
    kernel.prepare(layout).attend(row, row, row, cache, AttentionParams(1.0))


class InnerSink(Protocol):
    """Keeps intermediate results of layers."""

    def exports(self, layer: int, middle: Tensor) -> Exports:
        """`middle` [1, rows, width] enters the second half of `layer`. Returns where to export that
        half's intermediate results."""
        ...


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The context of serving: a prepared batch over the KV of every layer."""

    batch: AttentionBatch
    layers: list[LayerKV]
    # Rows whose hidden states are read after the last layer, int64 [rows]; None: all. The other
    # rows may then be any finite values.
    wanted: Tensor | None = None
    inner: InnerSink | None = None  # takes intermediate results of layers that can export them

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attend with the layer's own cache."""
        return self.batch.attend(query, key, value, self.layers[layer], params)


@dataclass(frozen=True, slots=True)
class PaddedContext:
    """A context whose passes have padding after the first `rows` rows.

    Padding attends to nothing, is not stored and gets zeros.
    """

    inner: AttentionContext
    rows: int

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attend for the real rows only."""
        rows = self.rows
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        output[:rows] = self.inner.attend(layer, query[:rows], key[:rows], value[:rows], params)
        return output
