"""What a layer's gradient does row by row, for one kind of device.

One object a device, chosen once by `gradient_kernels`. The CPU's are the C++ kernels; those of a
CUDA device are in `tandem.model.gpu.gradients`. Rows are dense. Nothing is differentiable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tandem.model import kernels
from tandem.model.attention.dense import DenseContext
from tandem.model.attention.gradient import (
    DenseGradient,
    GradientAttention,
    HeadShape,
    flash_gradient,
)
from tandem.model.joint import Joint, PairGradients
from tandem.model.kernels import backward
from tandem.model.kernels.backward import HeadTurn
from tandem.model.kernels.layer import NormWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Operands:
    """Of a projection's low-rank update: its input, `low` = input a', the gradient of the
    projection's output, and `low_gradient` = gradient b times the adapter's factor."""

    entering: Tensor
    low: Tensor
    gradient: Tensor
    low_gradient: Tensor


class GradientRows(Protocol):
    """Row operations, as plain functions of dense rows."""

    def rms_norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """Normalised rows of x [rows, width]."""
        ...

    def rms_norm_gradient(
        self, x: Tensor, norm: NormWeights, gradient: Tensor, residual: Tensor
    ) -> Tensor:
        """d/dx of the norm of x for `gradient`, plus `residual`; all [rows, width]."""
        ...

    def turn_heads(self, qkv: Tensor, turn: HeadTurn) -> Tensor:
        """Rows of heads, with queries and keys normalised and rotated."""
        ...

    def turn_heads_gradient(self, gradient: Tensor, qkv: Tensor, turn: HeadTurn) -> Tensor:
        """d/d(qkv) for `gradient` = d/d(turn_heads(qkv)), which may be changed."""
        ...

    def gated(self, joined: Tensor, gelu: bool) -> Tensor:
        """act(gate) * up [rows, width] of joined [rows, 2 width]; SiLU, or GELU's tanh form."""
        ...

    def gate_gradient(self, joined: Tensor, product: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
        """d/d(joined) for `product` = d/d(gated(joined)), and gated(joined)."""
        ...

    def pairs(self, operands: Operands, joint: Joint) -> PairGradients:
        """Gradients of the adapter's matrices by name."""
        ...


class CppGradientRows:
    """`GradientRows` on a CPU. Needs `kernels.status().available`."""

    def rms_norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """See `GradientRows`."""
        return kernels.rms_norm(x, norm.weight, norm.eps, norm.shifted)

    def rms_norm_gradient(
        self, x: Tensor, norm: NormWeights, gradient: Tensor, residual: Tensor
    ) -> Tensor:
        """See `GradientRows`."""
        return backward.rms_norm_gradient(x, norm, gradient, residual)

    def turn_heads(self, qkv: Tensor, turn: HeadTurn) -> Tensor:
        """See `GradientRows`."""
        return backward.turn_heads(qkv, turn)

    def turn_heads_gradient(self, gradient: Tensor, qkv: Tensor, turn: HeadTurn) -> Tensor:
        """See `GradientRows`. In place."""
        backward.turn_heads_gradient(gradient, qkv, turn)
        return gradient

    def gated(self, joined: Tensor, gelu: bool) -> Tensor:
        """See `GradientRows`. Differentiable."""
        gate, up = joined.chunk(2, dim=-1)
        act = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        return act * up

    def gate_gradient(self, joined: Tensor, product: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
        """See `GradientRows`."""
        with torch.enable_grad():
            leaf = joined.detach().requires_grad_()
            gated = self.gated(leaf, gelu)
        (result,) = torch.autograd.grad(gated, leaf, product)
        return result, gated.detach()

    def pairs(self, operands: Operands, joint: Joint) -> PairGradients:
        """See `GradientRows`."""
        low = operands.low * joint.scale.to(operands.low.dtype)
        return joint.split(
            operands.low_gradient.t() @ operands.entering, low.t() @ operands.gradient
        )


@dataclass(frozen=True, slots=True)
class GradientKernels:
    """What a layer's gradient computes with on one kind of device, beside torch's products."""

    rows: GradientRows
    attention: Callable[[HeadShape, DenseContext], GradientAttention]


def gradient_kernels(device: torch.device, dtype: torch.dtype) -> GradientKernels | None:
    """The kernels of a device for a model's numbers. None if it has none, so that autograd has to
    differentiate."""
    if device.type == "cpu":
        return (
            GradientKernels(CppGradientRows(), DenseGradient)
            if kernels.status().available
            else None
        )
    try:
        from tandem.model.gpu.gradients import TritonGradientRows
    except ImportError as error:
        logger.warning("Triton is missing, layers are differentiated by autograd: %s", error)
        return None
    return GradientKernels(TritonGradientRows(), partial(flash_gradient, dtype=dtype))
