"""Compiles attention and what is before it for an H100; see `hopper`."""

from __future__ import annotations

import numpy as np
import torch

from hopper import compiled
from tandem.model.attention.base import AttentionParams, BatchLayout, LayerKV, SpanArrays
from tandem.model.attention.tables import needed, write
from tandem.model.attention.tiles import cut
from tandem.model.attention.triton_kernel import TritonBatch
from tandem.model.gpu.heads import HeadNorms, store, turn_and_store

# heads, KV heads, head size: Llama-3-8B, Qwen2.5-0.5B, SmolLM2-135M, Gemma-2-2B, Phi-3, one KV
# head, and the test of a kernel when a model is loaded
SHAPES = [
    (32, 8, 128),
    (14, 2, 64),
    (9, 3, 64),
    (8, 4, 256),
    (32, 32, 96),
    (32, 1, 128),
    (1, 1, 16),
]
BLOCK = 16
SPANS = [(300, 1), (0, 70), (4000, 1), (20, 3)]


def attend(shape, dtype, params, norms):
    heads, kv_heads, dim = shape
    starts, lengths = (np.array(column) for column in zip(*SPANS, strict=True))
    rows, width = int(lengths.sum()), 256
    spans = SpanArrays(starts, lengths, np.zeros((len(SPANS), width), np.int32))
    layout, _ = BatchLayout.build(spans, BLOCK, torch.device("cpu"), dtype)
    tiles = cut(starts, lengths, 132)
    capacity = needed(layout, *map(len, tiles))
    buffer = torch.empty(capacity.nbytes, dtype=torch.uint8)
    write(capacity.views(buffer), layout, *tiles)
    cache = LayerKV(*(torch.empty((4, BLOCK, kv_heads, dim), dtype=dtype) for _ in range(2)))
    qkv = torch.empty((rows, (heads + 2 * kv_heads) * dim), dtype=dtype)
    angles = torch.empty((rows, dim), dtype=dtype)
    batch = TritonBatch(capacity.views(buffer))
    query = turn_and_store(qkv, angles, angles, batch.slots, cache, heads, kv_heads, norms)
    batch.attend_stored(query, cache, params)
    _, key, value = (
        each.view(rows, -1, dim)
        for each in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    )
    store(key, value, cache, batch.slots)


def main() -> None:
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            kinds = [(AttentionParams(0.1), None)]
            if dtype == torch.bfloat16:
                weight = torch.empty(shape[2], dtype=dtype)
                kinds += [
                    (AttentionParams(0.1, window=1024), HeadNorms(weight, weight, 1e-6, False)),
                    (AttentionParams(0.1, 1024, 50.0), HeadNorms(weight, weight, 1e-6, True)),
                ]
            for params, norms in kinds:

                def run(shape=shape, dtype=dtype, params=params, norms=norms):
                    attend(shape, dtype, params, norms)

                for each in compiled(run):
                    print(shape, str(dtype).removeprefix("torch."), params.window, each.name,
                          f"shared {each.shared}, registers {each.registers}, "
                          f"stack {each.spilled}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
