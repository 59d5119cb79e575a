"""The two halves of a decoder layer as one kernel call each, with their weights as plain data.

Each call gives, value for value, what the single kernels give one after the other; it saves what
lies between them. Not differentiable, bfloat16 only; callable where `kernels.amx_linear()`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NormWeights:
    """An RMS norm; see `kernels.rms_norm`."""

    weight: Tensor
    eps: float
    shifted: bool


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight packed by `kernels.pack_weight`, and its padded float32 bias."""

    packed: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Queries, keys and values are joined in `qkv`; head norms have the form of `norm`."""

    norm: NormWeights
    qkv: Panels
    out: Panels
    query_norm: Tensor | None
    key_norm: Tensor | None
    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Gate and up are joined in `gate_up`; the gate is SiLU, or GELU's tanh form with `gelu`."""

    norm: NormWeights
    gate_up: Panels
    down: Panels
    gelu: bool


@dataclass(frozen=True, slots=True)
class BatchTables:
    """Where an iteration's rows are in the cache and what they see.

    `slots` int64 [rows] as for `kernels.write_kv`, the rest int32 as for `kernels.paged_attention`.
    """

    slots: Tensor
    blocks: Tensor
    query_start: Tensor
    context_len: Tensor


def attention_block(
    x: Tensor,
    weights: AttentionWeights,
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    tables: BatchTables,
) -> Tensor:
    """x + out(attention(norm(x))) for a dense x [..., hidden]; keys and values are cached.

    `angles` are cosine and sine [..., R], dense, one row a token; `cache` is keys and values.
    """
    norm, qkv, out = weights.norm, weights.qkv, weights.out
    return torch.ops.tandem.attention_block.default(
        x,
        norm.weight,
        norm.eps,
        norm.shifted,
        qkv.packed,
        qkv.bias,
        weights.query_norm,
        weights.key_norm,
        out.packed,
        out.bias,
        *angles,
        *cache,
        tables.slots,
        tables.blocks,
        tables.query_start,
        tables.context_len,
        weights.scale,
        weights.window,
        weights.softcap,
    )


def mlp_block(x: Tensor, weights: MlpWeights) -> Tensor:
    """x + down(act(gate(n)) * up(n)) with n = norm(x), for a dense x [..., hidden]."""
    norm, gate_up, down = weights.norm, weights.gate_up, weights.down
    return torch.ops.tandem.mlp_block.default(
        x,
        norm.weight,
        norm.eps,
        norm.shifted,
        gate_up.packed,
        gate_up.bias,
        down.packed,
        down.bias,
        weights.gelu,
    )
