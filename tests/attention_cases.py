"""Batches for attention, and what attention makes of them, written out row by row."""

from __future__ import annotations

import numpy as np
import torch

from tandem.model.attention.base import BatchLayout, LayerKV, SpanArrays

BLOCK = 4
# KV heads, query heads of one of them, head size
SHAPE = (2, 3, 8)


def case(spans, seed=0, dtype=torch.float32, device="cpu", shape=SHAPE):
    """Random history in a scattered cache, new rows, and the layout that joins them."""
    kv_heads, group, dim = shape
    rng = np.random.default_rng(seed)
    starts, lengths = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    used = -(-(starts + lengths) // BLOCK)
    free = rng.permutation(int(used.sum()) + 3)
    tables = np.empty((len(spans), used.max()), dtype=np.int32)
    for row, count in enumerate(used):
        tables[row, :count], free = free[:count], free[count:]
        tables[row, count:] = tables[row, 0]
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    cache = LayerKV(*(noise(int(used.sum()) + 3, BLOCK, kv_heads, dim) for _ in range(2)))
    layout, positions = BatchLayout.build(
        SpanArrays(starts, lengths, tables), BLOCK, torch.device(device), dtype
    )
    rows = int(lengths.sum())
    new = (
        noise(rows, kv_heads * group, dim),
        noise(rows, kv_heads, dim),
        noise(rows, kv_heads, dim),
    )
    return cache, layout, positions, new


def reference(cache, layout, new, params):
    """Softmax over the visible keys of each row and head, in double precision."""
    query, key, value = (tensor.double() for tensor in new)
    keys, values = (store.double().flatten(0, 1).clone() for store in (cache.keys, cache.values))
    keys[layout.slots], values[layout.slots] = key, value
    out, row, group = torch.empty_like(query), 0, query.shape[1] // key.shape[1]
    for start, length, table in zip(layout.starts, layout.lengths, layout.tables, strict=True):
        for position in range(start, start + length):
            first = max(0, position - params.window + 1) if params.window else 0
            seen = [int(table[p // BLOCK]) * BLOCK + p % BLOCK for p in range(first, position + 1)]
            for head in range(query.shape[1]):
                scores = keys[seen, head // group] @ query[row, head] * params.scale
                if params.softcap:
                    scores = params.softcap * torch.tanh(scores / params.softcap)
                out[row, head] = scores.softmax(0) @ values[seen, head // group]
            row += 1
    return out
