"""Attention of whole sequences and its gradient, for layers that are differentiated by hand.

`DenseGradient` is autograd's, in any dtype and on any device. `FlashGradient` calls torch's Flash
kernels once for sequences of any lengths, on a CUDA device in 16 bits. A row is the heads of
queries, keys and values side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.model.attention.base import AttentionParams
from tandem.model.attention.dense import DenseContext

# Heads that torch's Flash kernels take.
_WIDEST, _STEP = 256, 8


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of a layer: `dim` wide, `heads` of queries, `kv_heads` of keys and of values."""

    layer: int
    dim: int
    heads: int
    kv_heads: int
    params: AttentionParams

    def split(self, turned: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [rows, heads, dim], views."""
        heads = turned.unflatten(-1, (-1, self.dim))
        return heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)


class GradientAttention(Protocol):
    """Attention of the sequences of one context in one layer."""

    def forward(self, turned: Tensor) -> tuple[Tensor, ...]:
        """Attention [rows, heads * dim] of turned rows, and what `backward` needs beside it."""
        ...

    def backward(self, attended: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """d/d(turned), dense, from what `forward` gave and d/d(its first)."""
        ...


@dataclass(frozen=True, slots=True)
class DenseGradient:
    """`GradientAttention` by autograd over the context's own attention."""

    shape: HeadShape
    context: DenseContext

    def forward(self, turned: Tensor) -> tuple[Tensor, ...]:
        """See `GradientAttention`."""
        with torch.enable_grad():
            leaf = turned.detach().requires_grad_()
            query, key, value = self.shape.split(leaf)
            mixed = self.context.attend(self.shape.layer, query, key, value, self.shape.params)
            return mixed.flatten(1), leaf

    def backward(self, attended: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """See `GradientAttention`."""
        mixed, leaf = attended
        (result,) = torch.autograd.grad(mixed, leaf, gradient, retain_graph=True)
        return result.contiguous()


@dataclass(frozen=True, slots=True)
class FlashGradient:
    """`GradientAttention` by torch's Flash kernels, chosen by `flash_gradient`."""

    shape: HeadShape
    context: DenseContext

    def forward(self, turned: Tensor) -> tuple[Tensor, ...]:
        """See `GradientAttention`."""
        query, key, value = self.shape.split(turned)
        mixed, sums, state, unused, _ = torch.ops.aten._flash_attention_forward.default(
            query, key, value, *self._sequences(turned), 0.0, True, False, **self._window()
        )  # fmt: skip
        return mixed.flatten(1), sums, state, unused, turned

    def backward(self, attended: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """See `GradientAttention`."""
        mixed, sums, state, unused, turned = attended
        query, key, value = self.shape.split(turned)
        by_head = (-1, self.shape.heads, self.shape.dim)
        found = torch.ops.aten._flash_attention_backward.default(
            gradient.view(by_head), query, key, value, mixed.view(by_head), sums,
            *self._sequences(turned), 0.0, True, state, unused, **self._window(),
        )  # fmt: skip
        return torch.cat([each.flatten(1) for each in found], dim=1)

    def _sequences(self, turned: Tensor) -> tuple[Tensor, Tensor, int, int]:
        bounds, longest = self.context.bounds(turned.device), max(self.context.lengths)
        return bounds, bounds, longest, longest

    def _window(self) -> dict[str, float | int | None]:
        window = self.shape.params.window
        return {
            "scale": self.shape.params.scale,
            "window_size_left": window - 1 if window else None,
            "window_size_right": 0 if window else None,
        }


def flash_gradient(
    shape: HeadShape, context: DenseContext, dtype: torch.dtype
) -> GradientAttention:
    """Attention on a CUDA device: Flash where its kernels suit."""
    suits = (
        dtype.itemsize == torch.bfloat16.itemsize
        and shape.dim % _STEP == 0
        and shape.dim <= _WIDEST
        and not shape.params.softcap
        # The forward of single rows folds heads in a way that the backward does not know.
        and max(context.lengths) > 1
    )
    return FlashGradient(shape, context) if suits else DenseGradient(shape, context)
