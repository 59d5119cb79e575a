"""What the fused modules compute row by row, for one kind of device.

An object of these functions is chosen when a model is loaded: `CppRows` on CPUs, Triton's on CUDA
devices (`tandem.model.gpu.rows`). The functions are not differentiable. Invariant: both round at
the same places.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tandem.model import kernels


class RowKernels(Protocol):
    """Inputs have a dense last dimension and may be columns of a joint product."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, shifted: bool = False) -> Tensor:
        """As `kernels.rms_norm`."""
        ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """As `kernels.rotary`."""
        ...

    def silu_mul(self, x: Tensor, up: Tensor) -> Tensor:
        """As `kernels.silu_mul`."""
        ...

    def gelu_tanh_mul(self, x: Tensor, up: Tensor) -> Tensor:
        """As `kernels.gelu_tanh_mul`."""
        ...


class CppRows:
    """The C++ kernels. Usable if `kernels.status().available`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, shifted: bool = False) -> Tensor:
        """See `RowKernels`."""
        return kernels.rms_norm(x, weight, eps, shifted)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowKernels`."""
        return kernels.rotary(q, k, cos, sin)

    def silu_mul(self, x: Tensor, up: Tensor) -> Tensor:
        """See `RowKernels`."""
        return kernels.silu_mul(x, up)

    def gelu_tanh_mul(self, x: Tensor, up: Tensor) -> Tensor:
        """See `RowKernels`."""
        return kernels.gelu_tanh_mul(x, up)
