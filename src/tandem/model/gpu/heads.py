"""Between the joint projection and attention: head norms, rotation, and the write to the cache.

One launch a layer, one program for a few heads of a row. Knows blocks only as slots: block *
block_size + offset. Invariant: a row with a negative slot writes nothing to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.model.attention.base import LayerKV
from tandem.model.gpu.early import after_predecessor, early_start
from tandem.model.gpu.launch import launch

# Elements of a program: four warps with at least 16 bytes a thread.
_ELEMENTS = 1024


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of single heads, weights [d]. `shifted`: the factor is 1 + weight (Gemma)."""

    query: Tensor
    key: Tensor
    eps: float
    shifted: bool


@triton.jit  # type: ignore[untyped-decorator]
def _normalised(x, inverse, weight, SHIFTED: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN202
    """`x` [heads, d] normalised, and rounded where the model's own norm rounds."""
    wide = x.to(tl.float32) * inverse[:, None]
    if SHIFTED:
        scaled = wide * (1.0 + weight.to(tl.float32))
    else:
        scaled = wide.to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    return scaled.to(x.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_and_store(  # type: ignore[no-untyped-def]
    qkv, cos, sin, slots, query_norm, key_norm, queries, keys, values,
    qkv_row, cos_row, sin_row, eps,
    QUERIES: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    TURNED: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, SHIFTED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Heads `program_id(1)` * HEADS and on of row `program_id(0)`."""
    after_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, DIM_PAD)
    HALF: tl.constexpr = TURNED // 2
    # Dimension i is rotated with i + HALF.
    turned = column < TURNED
    partner = tl.where(column < HALF, column + HALF, tl.where(turned, column - HALF, column))
    is_query = head < QUERIES
    is_value = head >= QUERIES + KV
    mask = (head < QUERIES + 2 * KV)[:, None] & (column < DIM)[None, :]
    base = qkv + row * qkv_row + head[:, None] * DIM
    x = tl.load(base + column[None, :], mask=mask, other=0.0)
    y = tl.load(base + partner[None, :], mask=mask, other=0.0)
    raw = x
    if NORM:
        wide = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)
        inside = column < DIM
        picked = is_query[:, None]
        weight = tl.where(
            picked,
            tl.load(query_norm + column, mask=inside, other=0.0)[None, :],
            tl.load(key_norm + column, mask=inside, other=0.0)[None, :],
        )
        other = tl.where(
            picked,
            tl.load(query_norm + partner, mask=inside, other=0.0)[None, :],
            tl.load(key_norm + partner, mask=inside, other=0.0)[None, :],
        )
        x = _normalised(x, inverse, weight, SHIFTED)
        y = _normalised(y, inverse, other, SHIFTED)
    c = tl.load(cos + row * cos_row + column, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + row * sin_row + column, mask=turned, other=0.0).to(tl.float32)
    s = tl.where(column < HALF, -s, s)
    rotated = x.to(tl.float32) * c[None, :] + y.to(tl.float32) * s[None, :]
    result = tl.where(turned[None, :], rotated.to(raw.dtype), x)

    to = queries + (row * QUERIES + head[:, None]) * DIM + column[None, :]
    tl.store(to, result, mask=mask & is_query[:, None])
    slot = tl.load(slots + row)
    if slot >= 0:
        place = (slot * KV + (head - QUERIES)[:, None]) * DIM + column[None, :]
        tl.store(keys + place, result, mask=mask & ((~is_query) & (~is_value))[:, None])
        tl.store(values + place - KV * DIM, raw, mask=mask & is_value[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    key, value, slots, keys, values, key_row, key_head, value_row, value_head,
    KV: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Heads `program_id(1)` * HEADS and on of row `program_id(0)`."""
    after_predecessor(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        column = tl.arange(0, DIM_PAD)
        mask = (head < KV)[:, None] & (column < DIM)[None, :]
        place = (slot * KV + head[:, None]) * DIM + column[None, :]
        from_key = key + row * key_row + head[:, None] * key_head + column[None, :]
        from_value = value + row * value_row + head[:, None] * value_head + column[None, :]
        tl.store(keys + place, tl.load(from_key, mask=mask), mask=mask)
        tl.store(values + place, tl.load(from_value, mask=mask), mask=mask)


def _heads_of_a_program(heads: int, dim_pad: int) -> int:
    return max(1, min(_ELEMENTS // dim_pad, triton.next_power_of_2(heads)))


def turn_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: LayerKV,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Queries [rows, heads, d] from `qkv` [rows, (heads + 2 kv_heads) * d], dense in a row.

    Queries and keys are normalised by `norms`, then rotated by `cos` and `sin` [rows, R] in their
    first R dimensions. Keys and values go to `cache` at `slots`, int64 [rows]; a negative slot
    stores nothing.
    """
    rows, dim = qkv.shape[0], cache.keys.shape[3]
    assert qkv.shape[1] == (heads + 2 * kv_heads) * dim
    assert (qkv.stride(1), cos.stride(1), sin.stride(1)) == (1, 1, 1)
    queries = torch.empty((rows, heads, dim), dtype=qkv.dtype, device=qkv.device)
    dim_pad = triton.next_power_of_2(dim)
    each = _heads_of_a_program(heads + 2 * kv_heads, dim_pad)
    query_norm, key_norm = (qkv, qkv) if norms is None else (norms.query, norms.key)
    launch(
        _turn_and_store, (rows, triton.cdiv(heads + 2 * kv_heads, each)),
        qkv, cos, sin, slots, query_norm, key_norm, queries, cache.keys, cache.values,
        qkv.stride(0), cos.stride(0), sin.stride(0), 0.0 if norms is None else norms.eps,
        QUERIES=heads, KV=kv_heads, DIM=dim, DIM_PAD=dim_pad, TURNED=cos.shape[1], HEADS=each,
        NORM=norms is not None, SHIFTED=norms is not None and norms.shifted,
        **early_start(qkv.device),
    )  # fmt: skip
    return queries


def store(key: Tensor, value: Tensor, cache: LayerKV, slots: Tensor) -> None:
    """Write `key` and `value` [rows, kv_heads, d] to `cache` at `slots`, int64 [rows]. A negative
    slot stores nothing."""
    key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (key, value))
    rows, kv_heads, dim = key.shape
    dim_pad = triton.next_power_of_2(dim)
    each = _heads_of_a_program(kv_heads, dim_pad)
    launch(
        _store, (rows, triton.cdiv(kv_heads, each)),
        key, value, slots, cache.keys, cache.values,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        KV=kv_heads, DIM=dim, DIM_PAD=dim_pad, HEADS=each, **early_start(key.device),
    )  # fmt: skip
