"""Which kernel multiplies how many rows with a weight on this device: measured when a model loads.

For each shape of the model's weights and a few numbers of rows, cuBLAS and some cuts of `thin` run
over weights that no cache holds, each behind a norm as in a layer: what a product can do while a
small kernel runs counts. The fastest one serves all products up to that number of rows; more than
64 rows are cuBLAS's. Invariant: equal inputs give equal bits for one choice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from triton.runtime.errors import OutOfResources

from tandem.model.gpu.rows import TritonRows
from tandem.model.gpu.thin import MOST_ROWS, Cut, Stripe, Workspace, multiply, padded_rows
from tandem.model.linear import GroupMember, PackedLinear, PackedWeight, PlainWeight

logger = logging.getLogger(__name__)

# (outputs, inputs) of a weight.
Shape = tuple[int, int]
# Most rows of a choice, and the rows at which it is measured.
BUCKETS = {1: 1, 16: 8, 32: 32, MOST_ROWS: MOST_ROWS}
# By padded rows. Each has 60 to 110 KiB in flight, two programs a multiprocessor where they fit.
_STRIPES = {
    16: (Stripe(64, 128, 5, 4), Stripe(64, 256, 4, 4), Stripe(128, 128, 3, 4)),
    32: (Stripe(64, 128, 4, 4), Stripe(128, 64, 4, 4), Stripe(256, 64, 3, 8)),
    64: (Stripe(128, 64, 4, 4), Stripe(128, 128, 3, 8), Stripe(256, 64, 3, 8)),
}
# For single precision, which no matrix unit multiplies exactly.
_WIDE_STRIPES = (Stripe(32, 64, 3, 4),)
# Ours serves if it takes at most so many times as long as cuBLAS.
FAVOUR = 1.05
# Programs a multiprocessor that parts are cut for. Fewer inputs than this make no part.
_WAVES = (1, 2, 4, 8)
_LEAST_STEPS = 2
_MOST_PARTS = 16
# Weights of a measurement lie in this much memory, several times what a cache holds.
_ARENA_BYTES = 256 << 20
_LEAST_PRODUCTS, _MOST_PRODUCTS = 4, 16
# The device waits this many cycles, about 2 ms, while products are submitted.
_SUBMISSION_CYCLES = 4_000_000
_MOST_SHAPES = 8
# Rows of other weights cannot be copied in pieces of 16 bytes.
_ALIGNED = 16
# Of the largest result; a few roundings in bfloat16.
_TOLERANCE = 2e-2


class ThinWeight:
    """A plain weight whose products of few rows are computed as chosen. A `PackedWeight`."""

    def __init__(
        self, plain: PlainWeight, cuts: Mapping[int, Cut | None], workspace: Workspace
    ) -> None:
        """`cuts` has the choice for each of `BUCKETS`; None is cuBLAS. The workspace has room."""
        self.plain = plain
        self._cuts = tuple(cuts.items())
        self._workspace = workspace

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.plain.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], with the bias."""
        return self._product(x, None)

    def multiply_onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [..., out] + the product of x, both rounded."""
        return self._product(x, residual)

    def settles(self, rows: int) -> bool:
        """Whether a kernel that is launched after a product of `x` [rows, in] finds `x` complete
        when it begins: see `thin.multiply`."""
        return self._cut(rows) is not None

    def transposed(self) -> PackedWeight:
        """A view, without a copy."""
        return self.plain.transposed()

    def _product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        rows = x.numel() // x.shape[-1]
        if (cut := self._cut(rows)) is None:
            product = self.plain.multiply(x)
            return product if residual is None else product.add_(residual)
        weight, bias = self.plain.weight, self.plain.bias
        added = None if residual is None else residual.reshape(rows, -1)
        out = multiply(x.reshape(rows, -1), weight, bias, added, cut, self._workspace)
        # Not a view, since the result of an autograd function may be changed in place.
        return out.resize_(*x.shape[:-1], weight.shape[0])

    def _cut(self, rows: int) -> Cut | None:
        if rows == 0:
            return None
        return next((cut for most, cut in self._cuts if rows <= most), None)


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves some rows, its cut (None: cuBLAS), and microseconds of a norm and the product:
    of our best cut (infinity without any), and of cuBLAS."""

    cut: Cut | None
    us: float
    cublas_us: float


def tune_products(model: nn.Module) -> dict[tuple[Shape, int], Choice]:
    """Measure the products of `model`, whose layers are packed, and let the fastest serve.

    Returns the choice by shape and bucket of rows. About a second, and some more to compile
    kernels once on a machine.
    """
    plain = [
        (layer, layer.weights)
        for layer in packed_layers(model)
        if isinstance(layer.weights, PlainWeight) and layer.weights.weight.is_contiguous()
    ]
    choices: dict[tuple[Shape, int], Choice] = {}
    if not plain:
        return choices
    like = max((weights.weight for _, weights in plain), key=Tensor.numel)
    layers: dict[Shape, list[tuple[PackedLinear, PlainWeight]]] = {}
    for layer, weights in plain:
        if weights.weight.dtype == like.dtype:
            shape = (layer.out_features, layer.in_features)
            layers.setdefault(shape, []).append((layer, weights))
    # The shapes that most bytes have.
    ranked = sorted(layers, key=lambda shape: -shape[0] * shape[1] * len(layers[shape]))
    workspace, arena = Workspace(like.device), Arena(like)
    for shape in ranked[:_MOST_SHAPES]:
        for most, rows in BUCKETS.items():
            choice = measure(layers[shape][0][1].weight, rows, arena, workspace)
            choices[shape, most] = choice
            logger.info("products of %s with %d rows: %s", shape, most, choice)
    for shape in ranked[:_MOST_SHAPES]:
        cuts = {most: choices[shape, most].cut for most in BUCKETS}
        for most, cut in cuts.items():
            if cut is not None:
                workspace.reserve(most, shape[0], cut)
        for layer, weights in layers[shape]:
            layer.weights = ThinWeight(weights, cuts, workspace)
    return choices


def candidates(shape: Shape, rows: int, dtype: torch.dtype, processors: int) -> Iterator[Cut]:
    """Cuts worth a measurement on a device with so many multiprocessors."""
    outputs, inputs = shape
    if inputs % _ALIGNED:
        return
    stripes = _WIDE_STRIPES if dtype == torch.float32 else _STRIPES[padded_rows(rows)]
    for stripe in stripes:
        steps = -(-inputs // stripe.inputs)
        most = max(1, min(_MOST_PARTS, steps // _LEAST_STEPS))
        wanted = {wave * processors // stripe.tiles(outputs) for wave in _WAVES}
        for parts in sorted({min(max(1, each), most) for each in wanted}):
            yield Cut(stripe, parts)


def packed_layers(model: nn.Module) -> Iterable[PackedLinear]:
    """Each packed layer once; those of groups are no modules of the model."""
    found = {module: None for module in model.modules() if isinstance(module, PackedLinear)}
    members = (module for module in model.modules() if isinstance(module, GroupMember))
    return found | {member.group.joined: None for member in members}


class Arena:
    """Gives weights of any shape, one after the other in memory, so that none is in a cache."""

    def __init__(self, like: Tensor) -> None:
        count = _ARENA_BYTES // like.element_size()
        self._memory = torch.empty(count, dtype=like.dtype, device=like.device).normal_()
        self._next = 0

    def weights(self, like: Tensor) -> list[Tensor]:
        """Some weights of the shape of `like`; itself if it is larger than the arena."""
        size = like.numel()
        wanted = self._memory.numel() // size
        if wanted == 0:
            return [like] * _LEAST_PRODUCTS
        found = []
        for _ in range(min(max(wanted, _LEAST_PRODUCTS), _MOST_PRODUCTS)):
            if self._next + size > self._memory.numel():
                self._next = 0
            found.append(self._memory[self._next : self._next + size].view_as(like))
            self._next += -(-size // 64) * 64
        return found


def measure(weight: Tensor, rows: int, arena: Arena, workspace: Workspace) -> Choice:
    """The fastest product of so many rows with a weight like `weight`. Grows `workspace`."""
    shape = (weight.shape[0], weight.shape[1])
    x = torch.randn(rows, shape[1], device=weight.device).to(weight.dtype)
    factor, by_row = torch.ones_like(x[0]), TritonRows()

    def normal() -> Tensor:
        return by_row.rms_norm(x, factor, 1e-6)

    cublas = _time_us(lambda each: functional.linear(normal(), each), arena.weights(weight))
    best = Choice(None, math.inf, cublas)
    processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
    for cut in candidates(shape, rows, weight.dtype, processors):
        workspace.reserve(rows, shape[0], cut)

        def product(each: Tensor, cut: Cut = cut) -> Tensor:
            return multiply(normal(), each, None, None, cut, workspace)

        try:
            took = _time_us(product, arena.weights(weight))
        except OutOfResources:  # of a smaller device
            continue
        if took < best.us and _agree(product(weight), functional.linear(normal(), weight)):
            best = Choice(cut, took, cublas)
    return best if best.us <= FAVOUR * cublas else replace(best, cut=None)


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Whether they differ by roundings only. Sums are in float32, in another order."""
    error = (found.float() - expected.float()).abs().max()
    return bool(error <= _TOLERANCE * expected.float().abs().max())


def _time_us(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Microseconds of a product, with others before and after it on the device."""
    product(weights[0])  # compiles
    weights = weights[1:]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # While the device sleeps, all launches are submitted: they then follow without gaps.
    torch.cuda._sleep(_SUBMISSION_CYCLES)
    start.record()
    for weight in weights:
        product(weight)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / len(weights)
