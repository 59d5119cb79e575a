"""The CPU kernel: one C++ call per layer for any mix of spans, straight from the blocks.

Only the tables are prepared here; `tandem.model.kernels` has the computation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tandem.model import kernels
from tandem.model.attention.base import AttentionBatch, AttentionParams, BatchLayout, LayerKV
from tandem.model.kernels.layer import BatchTables


class CpuKernel:
    """Usable if `tandem.model.kernels.status().available`."""

    @property
    def name(self) -> str:
        """Short name for `ModelInfo.kernels`."""
        return "cpu"

    def prepare(self, layout: BatchLayout) -> AttentionBatch:
        """Tables in the kernel's types."""
        return CpuBatch(layout)

    def reserve(self, rows: int, spans: int, width: int) -> None:
        """See `AttentionKernel`."""


class CpuBatch:
    """One iteration's tables, shared by all layers."""

    def __init__(self, layout: BatchLayout) -> None:
        ends = np.cumsum(layout.lengths)
        self.tables = BatchTables(
            slots=layout.slots,
            blocks=torch.from_numpy(layout.tables),
            query_start=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            context_len=torch.from_numpy((layout.starts + layout.lengths).astype(np.int32)),
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, cache: LayerKV, params: AttentionParams
    ) -> Tensor:
        """Store keys and values, then attend in one call."""
        tables = self.tables
        kernels.write_kv(key, value, cache.keys, cache.values, tables.slots)
        return kernels.paged_attention(
            query,
            cache.keys,
            cache.values,
            tables.blocks,
            tables.query_start,
            tables.context_len,
            scale=params.scale,
            window=params.window,
            softcap=params.softcap,
        )
