"""Kernels for the gradient of a decoder layer, as plain functions.

Kernels on rows support float32, bfloat16 and float16, and need `status().available`. Kernels on
tiles are bfloat16 and need `amx_linear()`. Tiles are rows in blocks of 32, [blocks, steps, 32, 32];
rows past the end are zero in a gradient and finite elsewhere. An update is an adapter's part of a
product: `low` tiles times `up`, packed like a weight. Nothing is differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.model.kernels.layer import NormWeights, Panels


@dataclass(frozen=True, slots=True)
class Update:
    """An adapter's addition to a product of the same rows."""

    low: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """How queries and keys are normalised and rotated.

    `norm` gives eps and shift of both norms; its weight is not used.

    `cos`, `sin`: [rows, R], contiguous. One row holds `heads + 2 * kv_heads` heads.
    """

    query_norm: Tensor | None
    key_norm: Tensor | None
    norm: NormWeights
    cos: Tensor
    sin: Tensor
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class DenseShape:
    """Consecutive sequences, and how each attends to itself."""

    lengths: Sequence[int]
    heads: int
    kv_heads: int
    scale: float
    window: int


def rms_norm_gradient(
    x: Tensor, norm: NormWeights, gradient: Tensor, residual: Tensor | None
) -> Tensor:
    """d/dx of the norm of x [rows, width] for `gradient`, plus `residual`; all dense."""
    return torch.ops.tandem.rms_norm_gradient.default(
        x, norm.weight, gradient, residual, norm.eps, norm.shifted
    )


def turn_heads(qkv: Tensor, turn: HeadTurn) -> Tensor:
    """Dense rows of heads, with queries and keys normalised and rotated."""
    return torch.ops.tandem.turn_heads.default(
        qkv, turn.query_norm, turn.key_norm, turn.norm.eps, turn.norm.shifted,
        turn.cos, turn.sin, turn.heads, turn.kv_heads,
    )  # fmt: skip


def turn_heads_gradient(gradient: Tensor, qkv: Tensor, turn: HeadTurn) -> None:
    """Turn d/d(turn_heads(qkv)) into d/d(qkv), in place."""
    torch.ops.tandem.turn_heads_gradient.default(
        gradient, qkv, turn.query_norm, turn.key_norm, turn.norm.eps, turn.norm.shifted,
        turn.cos, turn.sin, turn.heads, turn.kv_heads,
    )  # fmt: skip


def dense_attention(qkv: Tensor, shape: DenseShape) -> tuple[Tensor, Tensor]:
    """Causal attention of turned rows of heads whose width is a multiple of 32: [rows, heads * d],
    and log2 of each row's sum of weights, [heads, rows] float32."""
    return torch.ops.tandem.dense_attention.default(
        qkv, shape.lengths, shape.heads, shape.kv_heads, shape.scale, shape.window
    )


def dense_attention_gradient(
    qkv: Tensor, attended: tuple[Tensor, Tensor], gradient: Tensor, shape: DenseShape
) -> Tensor:
    """d/d(qkv), from the results of `dense_attention` and d/d(its first result)."""
    return torch.ops.tandem.dense_attention_gradient.default(
        qkv, *attended, gradient,
        shape.lengths, shape.heads, shape.kv_heads, shape.scale, shape.window,
    )  # fmt: skip


def row_tiles(x: Tensor) -> Tensor:
    """Tiles of rows [rows, width]."""
    return torch.ops.tandem.row_tiles.default(x)


def norm_tiles(x: Tensor, norm: NormWeights) -> Tensor:
    """Tiles of the normalised rows of a dense x [rows, width]."""
    return torch.ops.tandem.norm_tiles.default(x, norm.weight, norm.eps, norm.shifted)


def updated_rows(
    tiles: Tensor, weight: Panels, update: Update | None, size: tuple[int, int],
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The product plus the update, the bias and `residual`: [rows, columns], the `size`."""
    low, up = (update.low, update.up) if update is not None else (None, None)
    return torch.ops.tandem.updated_rows.default(
        tiles, weight.packed, weight.bias, low, up, residual, *size
    )


def updated_tiles(
    tiles: Tensor, weight: Panels, update: Update | None, scale: Tensor | None = None
) -> Tensor:
    """The product plus the update, times `scale` (float32) by column, plus the bias, as tiles."""
    low, up = (update.low, update.up) if update is not None else (None, None)
    return torch.ops.tandem.updated_tiles.default(tiles, weight.packed, weight.bias, low, up, scale)


def gated_tiles(joined: Tensor, gelu: bool) -> Tensor:
    """act(gate) * up, for tiles whose first half of columns is the gate."""
    return torch.ops.tandem.gated_tiles.default(joined, gelu)


def gate_gradients(
    tiles: Tensor, weight: Panels, update: Update | None, joined: Tensor, gelu: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of `joined` (as in `gated_tiles`), and the gated result again.

    The product plus the update is the gradient of the gated result.
    """
    low, up = (update.low, update.up) if update is not None else (None, None)
    return torch.ops.tandem.gate_gradients.default(tiles, weight.packed, low, up, joined, gelu)


def thin_product(thin: Tensor, wide: Tensor) -> Tensor:
    """`thin` transposed times `wide`, over all rows of both tiles: float32 [columns of thin,
    columns of wide]."""
    return torch.ops.tandem.thin_product.default(thin, wide)
