"""Frozen linear layers whose weights are packed once for the CPU's matrix kernels.

A packed layer has its weight in one layout: panels for one of our own kernels (AMX tiles or vector
registers), oneDNN's blocks, or the plain matrix (other devices). It is differentiable only in its
input. The backward product uses a second packing, of the transposed weight, made when the first
gradient is needed. Nothing is saved for backward. Of models it knows only `nn.Linear` layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.model import kernels
from tandem.model.kernels.layer import Panels, VectorPanels

# oneDNN blocks a weight for an expected number of rows. This one serves decode and prefill.
_ONEDNN_ROWS = 256
# oneDNN compiles a kernel for each number of rows. Up to `_OWN_ROWS` every number is used, then
# `_PER_DOUBLING` numbers per doubling.
_OWN_ROWS = 64
_PER_DOUBLING = 32
# Capacity of oneDNN's kernel cache. Each product takes two entries of 263 kB, whatever its shape.
# torch keeps 1,024 products alive, so more entries would cost unbounded memory for little time.
_KEPT_KERNELS = 2048
_KERNEL_BYTES = 263 << 10
_OLD_NAME = "DNNL_PRIMITIVE_CACHE_CAPACITY"  # read by oneDNN, too
_STEP = 32
# Values of a weight that are rounded to bfloat16 at once, to compare them.
_COMPARED = 1 << 18


def keep_kernels() -> None:
    """Let oneDNN keep more kernels, unless the environment sets a number.

    Its default of 1,024 entries covers the products of a hundred numbers of rows; others would be
    compiled again and again. oneDNN reads the setting at the first product of the process.
    """
    if _OLD_NAME not in os.environ:
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_KERNELS))


def kernel_bytes(layers: Iterable[PackedLinear]) -> int:
    """Bytes of kernels that oneDNN has cached for the products of `layers`, up to its capacity."""
    products = {product for layer in layers for product in layer.compiled()}
    kept = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY") or os.environ.get(_OLD_NAME)
    entries = int(kept) if kept is not None and kept.isdecimal() else _KEPT_KERNELS
    return min(2 * len(products), entries) * _KERNEL_BYTES


def compiled_rows(rows: int) -> int:
    """`rows` rounded up, by at most 3%, to a number for which oneDNN kernels are compiled."""
    if rows <= _OWN_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _PER_DOUBLING)
    return -(-rows // step) * step


class PackedWeight(Protocol):
    """A frozen weight [out, in] with its bias, in the layout of one matrix kernel."""

    @property
    def nbytes(self) -> int:
        """Bytes of this packing."""
        ...

    def multiply(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], with the bias. Not differentiable."""
        ...

    def transposed(self) -> PackedWeight:
        """The weight of the backward product, [in, out], without a bias, packed anew."""
        ...


@dataclass(frozen=True, slots=True)
class PlainWeight:
    """The plain matrix, for `F.linear`."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.weight.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """`F.linear` with the bias."""
        return functional.linear(x, self.weight, self.bias)

    def transposed(self) -> PackedWeight:
        """A view, without a copy."""
        return PlainWeight(self.weight.t(), None)


class OneDnnWeight:
    """A weight in oneDNN's blocks, packed and multiplied through torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)
        self._bias = bias
        self._nbytes = weight.nbytes
        self._shape = weight.shape
        self._compiled: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self._nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """The product, over `compiled_rows` rows, so that few kernels are compiled."""
        rows = x.numel() // x.shape[-1]
        if (more := compiled_rows(rows) - rows) == 0:
            return self._product(x)
        product = self._product(functional.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, more)))
        # Not a view, since the result of an autograd function may be changed in place.
        return product.resize_(*x.shape[:-1], product.shape[-1])

    @property
    def compiled(self) -> set[tuple[int, int, int]]:
        """Products so far: (outputs, inputs, rows)."""
        outputs, inputs = self._shape
        return {(outputs, inputs, rows) for rows in self._compiled}

    def _product(self, x: Tensor) -> Tensor:
        self._compiled.add(x.numel() // x.shape[-1])
        return cast(
            Tensor,
            torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], ""),
        )

    def transposed(self) -> PackedWeight:
        """The transposed weight, in blocks again."""
        plain = self._packed.to_dense().view(self._shape)
        return OneDnnWeight(plain.t().contiguous(), None)


class AmxWeight:
    """Panels for our own AMX kernel (`kernels/matmul.cpp`). bfloat16, inputs a multiple of 32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._rows = weight.shape[0]
        padded: Tensor | None = None
        packed = kernels.pack_weight(weight.contiguous())
        if bias is not None:
            padded = torch.zeros(packed.shape[0] * _STEP)
            padded[: self._rows] = bias
        self.panels = Panels(packed, padded)

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.packed.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """The product by the AMX kernel."""
        return kernels.packed_linear(x, self.panels.packed, self.panels.bias, self._rows)

    def transposed(self) -> PackedWeight:
        """The transposed weight in its own fastest packing."""
        return pack(kernels.unpack_weight(self.panels.packed, self._rows).t().contiguous(), None)


class PanelWeight:
    """Panels for our own kernel in vector registers (`kernels/panels.h`), for any CPU.

    The panels are bfloat16 if that changes no value, so a bfloat16 checkpoint that is computed in
    float32 is read at half the bytes. Products and sums are float32 in any case.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._shape = weight.shape
        stored = weight.bfloat16() if fits_bfloat16(weight) else weight
        bias = bias.float().contiguous() if bias is not None else None
        self.panels = VectorPanels(kernels.pack_panels(stored.contiguous()), bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the panels."""
        return self.panels.packed.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """The product by our kernel, in the dtype of `x`."""
        return kernels.panel_linear(x, self.panels.packed, self.panels.bias, self._shape[0])

    def transposed(self) -> PackedWeight:
        """The transposed weight, in panels again."""
        plain = kernels.unpack_panels(self.panels.packed, *self._shape)
        return PanelWeight(plain.t(), None)


def fits_bfloat16(weight: Tensor) -> bool:
    """Whether bfloat16 holds every value of a weight [out, in]. Slices are compared one by one, so
    no copy of the whole weight is made, and the first slice may be enough."""
    if weight.dtype is torch.bfloat16:
        return True
    rows = max(1, _COMPARED // max(1, weight.shape[1]))
    return all(torch.equal(part.bfloat16().to(part.dtype), part) for part in weight.split(rows))


# Makes the packing of a weight [out, in] with its bias.
Pack = Callable[[Tensor, Tensor | None], PackedWeight]


def pack(weight: Tensor, bias: Tensor | None) -> PackedWeight:
    """The fastest packing of `weight` [out, in] for its device and dtype."""
    weight = weight.detach()
    bias = bias.detach() if bias is not None else None
    onednn = torch.backends.mkldnn.is_available()
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return PlainWeight(weight, bias)
    if weight.dtype == torch.float32:
        return OneDnnWeight(weight, bias) if onednn else PlainWeight(weight, bias)
    if weight.shape[1] % _STEP == 0 and kernels.amx_linear():
        return AmxWeight(weight, bias)
    if onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return OneDnnWeight(weight, bias)
    return PlainWeight(weight, bias)


class _Multiply(torch.autograd.Function):
    """y = x W' + b with a frozen W. Saves no tensor; only x gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        return layer.weights.multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.layer.backward_weights().multiply(gradients[0].contiguous()), None


class PackedLinear(nn.Module):
    """A frozen `nn.Linear`: x [..., in_features] -> [..., out_features].

    Several weights over the same input may be joined by rows (`of`). It has no parameters: the
    layer is not in `state_dict`, and no optimiser can reach it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, by: Pack = pack) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weights = by(weight, bias)
        self._backward_weights: PackedWeight | None = None

    @staticmethod
    def of(*linears: nn.Linear, by: Pack = pack) -> PackedLinear:
        """The layers joined, with their outputs side by side in the given order."""
        if len(linears) == 1:
            return PackedLinear(linears[0].weight, linears[0].bias, by)
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases: list[Tensor | None] = [linear.bias for linear in linears]
        if all(bias is None for bias in biases):
            return PackedLinear(weight, None, by)
        parts = [
            linear.weight.new_zeros(linear.out_features) if bias is None else bias.detach()
            for linear, bias in zip(linears, biases, strict=True)
        ]
        return PackedLinear(weight, torch.cat(parts), by)

    @property
    def nbytes(self) -> int:
        """Bytes of the packings that exist now."""
        back = self._backward_weights
        return self.weights.nbytes + (back.nbytes if back is not None else 0)

    def compiled(self) -> set[tuple[int, int, int]]:
        """Products for which oneDNN has compiled kernels: (outputs, inputs, rows)."""
        both = (self.weights, self._backward_weights)
        return {one for each in both if isinstance(each, OneDnnWeight) for one in each.compiled}

    def forward(self, x: Tensor) -> Tensor:
        """The product. Differentiable in `x`."""
        if x.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _Multiply.apply(x, self))
        return self.weights.multiply(x)

    def backward_weights(self) -> PackedWeight:
        """The packing of the transposed weight, made on the first call."""
        if self._backward_weights is None:
            self._backward_weights = self.weights.transposed()
        return self._backward_weights

    def extra_repr(self) -> str:
        """Features and packing, for printing a model."""
        kind = type(self.weights).__name__
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


class LinearGroup:
    """Linear layers that read the same input, computed by one product.

    Its members are separate modules, so an adapter may wrap each of them. The first member that is
    called with a tensor computes the product for all. The output is dropped after the last one.
    """

    def __init__(self, *linears: nn.Linear, by: Pack = pack) -> None:
        self.joined = PackedLinear.of(*linears, by=by)
        self.members: list[GroupMember] = []
        start = 0
        for linear in linears:
            end = start + linear.out_features
            self.members.append(GroupMember(self, start, end))
            start = end
        self._input: Tensor | None = None
        self._version = 0
        self._output: Tensor | None = None
        self._split: dict[int, Tensor] = {}

    def part(self, x: Tensor, start: int, end: int) -> Tensor:
        """Columns start:end of the joined product of `x`, as a view."""
        # Identity alone is not enough: the caller may have changed the tensor in place.
        if self._input is not x or self._version != x._version or self._output is None:
            self._split = {}
            self._output = self.joined(x)
            self._input, self._version = x, x._version
            if self._output.requires_grad:
                # One autograd node for all parts joins their gradients without zero padding.
                sizes = [member.out_features for member in self.members]
                parts = self._output.split(sizes, dim=-1)
                starts = [member.start for member in self.members]
                self._split = dict(zip(starts, parts, strict=True))
        part = self._split[start] if self._split else self._output[..., start:end]
        if end == self.joined.out_features:
            self._input = self._output = None
            self._split = {}
        return part


class GroupMember(nn.Module):
    """One layer of a `LinearGroup`: x [..., in_features] -> [..., out_features], a view."""

    def __init__(self, group: LinearGroup, start: int, end: int) -> None:
        super().__init__()
        self.group = group
        self.start, self.end = start, end
        self.in_features, self.out_features = group.joined.in_features, end - start

    def forward(self, x: Tensor) -> Tensor:
        """This member's part of the joined product."""
        return self.group.part(x, self.start, self.end)

    def extra_repr(self) -> str:
        """Features, for printing a model."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


@dataclass(frozen=True, slots=True)
class PackReport:
    """Number of packed products of a model, including those of groups, and bytes of their packings.

    `pads`: all products are faster with the row numbers of `compiled_rows`.
    """

    layers: int
    nbytes: int
    pads: bool


def pack_linears(model: nn.Module, by: Pack = pack) -> PackReport:
    """Replace every `nn.Linear` of `model` in place. A weight that is tied to an embedding is
    copied.

    The plain weights are freed if nothing else refers to them.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear.of(child, by=by))
    packed = {module for module in model.modules() if isinstance(module, PackedLinear)}
    members = {module for module in model.modules() if isinstance(module, GroupMember)}
    packed |= {member.group.joined for member in members}
    pads = bool(packed) and all(isinstance(layer.weights, OneDnnWeight) for layer in packed)
    return PackReport(len(packed), sum(layer.nbytes for layer in packed), pads)
