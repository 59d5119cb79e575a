"""Ratios of Tandem's CPU kernels to torch's, and a whole step of a Qwen2.5-0.5B shape.

Every comparison is interleaved in this process and reported as medians, so that a noisy machine
slows both sides alike. The ceiling of decode is one pass over the weights. Run with
MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296 (glibc otherwise
returns large temporaries to the system after each operation).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import typer
from torch.nn import functional

from tandem.model import kernels
from tandem.model.linear import AmxWeight, OneDnnWeight, PackedWeight, PanelWeight, PlainWeight

HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK = 896, 4864, 14, 2, 64, 16
SHAPES = {"qkv": (HIDDEN, 1152), "gate_up": (HIDDEN, 2 * INNER), "down": (INNER, HIDDEN)}
COLD_BYTES = 150_000_000  # of weights in a row, so that none is found in a cache


def medians(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """Seconds of each call, taken in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn:
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def linears(amx: bool) -> None:
    """Our product, oneDNN's packed one and the plain one, on weights that are not cached: in
    bfloat16 with AMX, else in float32 with values that bfloat16 has. GB/s are of our packing."""
    dtype = torch.bfloat16 if amx else torch.float32
    print("linear      rows   GB/s ours onednn plain    TFLOP/s ours   ours/onednn")
    for name, (inputs, outputs) in SHAPES.items():
        half = torch.randn(outputs, inputs).bfloat16()
        weight, copies = half.to(dtype), max(1, COLD_BYTES // half.nbytes)
        kinds = (AmxWeight if amx else PanelWeight, OneDnnWeight, PlainWeight)
        packed = [[kind(weight.clone(), None) for _ in range(copies)] for kind in kinds]
        for rows in (1, 8, 32, 64, 256, 1024):
            x = torch.randn(rows, inputs).to(dtype)
            some = copies if rows < 256 else min(copies, 3)

            def all_of(weights: list[PackedWeight], x: torch.Tensor = x, n: int = some) -> None:
                for one in weights[:n]:
                    one.multiply(x)

            ours, onednn, plain = (
                t / some for t in medians(7, *(lambda w=w: all_of(w) for w in packed))
            )
            gb = [half.nbytes / t / 1e9 for t in (ours, onednn, plain)]
            tera = 2 * rows * inputs * outputs / ours / 1e12
            print(
                f"{name:10}{rows:6}      {gb[0]:5.1f} {gb[1]:6.1f} {gb[2]:5.1f}"
                f"    {tera:12.2f}   {onednn / ours:11.2f}"
            )


def attention(dtype: torch.dtype) -> None:
    """Paged attention against flash attention on gathered, dense keys (its gather not counted)."""
    print("attention  heads   spans x queries / context      ms ours   GB/s    ms sdpa   ratio")
    for heads in ((HEADS, KV_HEADS), (8, 4)):
        for spans, queries, context in (
            *((1, 1, 160), (32, 1, 160), (1, 1, 8192)),
            *((12, 1, 1536), (12, 1, 4096), (1, 1024, 1024)),
        ):
            ours, sdpa = _attention_seconds(spans, queries, context, heads, dtype)
            read = 2 * spans * context * heads[1] * DIM * dtype.itemsize
            label = f"{spans} x {queries} / {context}"
            print(
                f"{heads[0]:>13}/{heads[1]} {label:>27} {ours * 1e3:12.3f} {read / ours / 1e9:6.1f}"
                f" {sdpa * 1e3:10.3f} {sdpa / ours:7.2f}"
            )


def _attention_seconds(
    spans: int, queries: int, context: int, heads: tuple[int, int], dtype: torch.dtype
) -> list[float]:
    width, kv_heads = -(-context // BLOCK), heads[1]
    k, v = (torch.randn(spans * width, BLOCK, kv_heads, DIM, dtype=dtype) for _ in range(2))
    q = torch.randn(spans * queries, heads[0], DIM, dtype=dtype)
    table = torch.arange(spans * width).view(spans, width).int()
    starts = (torch.arange(spans + 1) * queries).int()
    lengths = torch.full((spans,), context).int()
    dense = [x.view(spans, -1, kv_heads, DIM).transpose(1, 2) for x in (k, v)]
    rows = q.view(spans, queries, heads[0], DIM).transpose(1, 2)
    return medians(
        20,
        lambda: kernels.paged_attention(q, k, v, table, starts, lengths, scale=0.125),
        lambda: functional.scaled_dot_product_attention(
            rows, *dense, is_causal=queries > 1, enable_gqa=True
        ),
    )


def rows() -> None:
    """The row kernels against the operations of transformers' modules."""
    print("rows        tokens   us ours   us torch   ratio")
    for tokens in (1, 32, 1024):
        x = torch.randn(tokens, HIDDEN).bfloat16()
        weight = torch.ones(HIDDEN).bfloat16()
        gate_up = torch.randn(tokens, 2 * INNER).bfloat16()
        gate, up = gate_up[:, :INNER], gate_up[:, INNER:]

        def plain_norm(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            wide = x.float()
            normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            return weight * normal.to(x.dtype)

        pairs = {
            "rms_norm": (lambda x=x, w=weight: kernels.rms_norm(x, w, 1e-6), plain_norm),
            "silu_mul": (
                lambda g=gate, u=up: kernels.silu_mul(g, u),
                lambda g=gate, u=up: functional.silu(g) * u,
            ),
        }
        for name, (own, plain) in pairs.items():
            ours, theirs = medians(30, own, plain)
            print(
                f"{name:10}{tokens:8} {ours * 1e6:9.1f} {theirs * 1e6:10.1f} {theirs / ours:7.2f}"
            )


def main() -> None:
    """Print everything, with the ceiling measured in the same run."""
    torch.manual_seed(0)
    print(kernels.status(), torch.get_num_threads(), "threads")
    amx = kernels.amx_linear()
    big = torch.ones(64_000_000)
    (read,) = medians(7, lambda: big.sum())
    print(f"reading {big.nbytes / read / 1e9:.1f} GB/s")
    linears(amx)
    attention(torch.bfloat16 if amx else torch.float32)
    rows()


if __name__ == "__main__":
    typer.run(main)
