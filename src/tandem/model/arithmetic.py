"""The arithmetic of a layer's gradient over joint projections.

Two arithmetics do the same steps: torch's on rows, in any dtype and on any device, and our C++
kernels' on tiles, in bfloat16. An operand is the input of a product: rows for the one, tiles for
the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tandem.model import kernels
from tandem.model.attention.dense import DenseContext
from tandem.model.attention.gradient import HeadShape
from tandem.model.gradient_rows import GradientKernels, Operands
from tandem.model.joint import Joint, PairGradients
from tandem.model.kernels import backward
from tandem.model.kernels.backward import DenseShape, Update
from tandem.model.kernels.layer import NormWeights, Panels


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What an arithmetic has to know of a layer and its rows."""

    attention: HeadShape
    gelu: bool
    context: DenseContext


class TorchArithmetic:
    """The arithmetic on rows: products with torch, the rest with a device's kernels, in any dtype.

    The factor of an update is in `scaled_b`, forwards and backwards.
    """

    def __init__(self, shape: LayerShape, by: GradientKernels) -> None:
        self._shape = shape
        self._rows = by.rows
        self._attention = by.attention(shape.attention, shape.context)

    def operand(self, rows: Tensor) -> Tensor:
        """The operand of [rows, width]."""
        return rows

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """The operand of normalised rows."""
        return self._rows.rms_norm(x, norm)

    def low(self, operand: Tensor, joint: Joint) -> Tensor | None:
        """The update's low-rank product [rows, ranks]."""
        return operand @ joint.a.t() if joint.ranks else None

    def low_back(self, gradient: Tensor, joint: Joint) -> Tensor | None:
        """Gradient of the update's low-rank product, [rows, ranks]."""
        return gradient @ joint.scaled_b if joint.ranks else None

    def rows(
        self, operand: Tensor, joint: Joint, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The projection plus `residual` as rows, and its low-rank product."""
        low = self.low(operand, joint)
        out = joint.frozen.weights.multiply(operand)
        if low is not None:
            out.addmm_(low, joint.scaled_b.t())
        return (out if residual is None else out.add_(residual)), low

    def inner(self, operand: Tensor, joint: Joint) -> tuple[Tensor, Tensor | None]:
        """The projection in the form that `gated` reads, and its low-rank product."""
        return self.rows(operand, joint)

    def gated(self, joined: Tensor) -> Tensor:
        """The operand act(gate) * up."""
        return self._rows.gated(joined, self._shape.gelu)

    def rows_back(self, gradient: Tensor, joint: Joint, low: Tensor | None) -> Tensor:
        """d/d(input) of a projection, as rows. `low` is from `low_back`."""
        out = joint.frozen.backward_weights().multiply(gradient)
        return out if low is None else out.addmm_(low, joint.a)

    def gate_back(
        self, gradient: Tensor, joint: Joint, low: Tensor | None, joined: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Operands: d/d(joined) through the gate and the projection `joint`, and `gated`."""
        product = self.rows_back(gradient, joint, low)
        return self._rows.gate_gradient(joined, product, self._shape.gelu)

    def pairs(
        self,
        entering: Tensor,
        low: Tensor | None,
        gradient: Tensor,
        low_gradient: Tensor | None,
        joint: Joint,
        found: PairGradients,
    ) -> None:
        """Gradients of the adapter's matrices, from the projection's input operand, the gradient of
        its output, and the low-rank products of both."""
        if low is not None and low_gradient is not None:
            found.update(self._rows.pairs(Operands(entering, low, gradient, low_gradient), joint))

    def attend(self, turned: Tensor) -> tuple[Tensor, ...]:
        """Attention [rows, heads * d] of turned rows of heads, and what `attend_back` needs."""
        return self._attention.forward(turned)

    def attend_back(self, attended: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """d/d(turned), dense."""
        return self._attention.backward(attended, gradient)


class TileArithmetic:
    """The arithmetic on tiles, with our kernels, in bfloat16. Its methods are
    `TorchArithmetic`'s. A low-rank product is scaled once by its adapter's factor, so both of its
    gradients are plain products."""

    def __init__(self, shape: LayerShape) -> None:
        heads = shape.attention
        self._gelu = shape.gelu
        self._rows = sum(shape.context.lengths)
        self._shape = DenseShape(
            shape.context.lengths, heads.heads, heads.kv_heads, heads.params.scale,
            heads.params.window,
        )  # fmt: skip

    def operand(self, rows: Tensor) -> Tensor:
        """Tiles of rows [rows, width]."""
        return backward.row_tiles(rows)

    def norm(self, x: Tensor, norm: NormWeights) -> Tensor:
        """Tiles of normalised rows."""
        return backward.norm_tiles(x, norm)

    def low(self, operand: Tensor, joint: Joint) -> Tensor | None:
        """The update's low-rank product as tiles, scaled."""
        if not joint.ranks:
            return None
        return backward.updated_tiles(operand, _pack(joint.a), None, joint.scale)

    def low_back(self, gradient: Tensor, joint: Joint) -> Tensor | None:
        """Gradient of the update's low-rank product as tiles, scaled."""
        if not joint.ranks:
            return None
        return backward.updated_tiles(gradient, _pack(joint.b.t()), None, joint.scale)

    def rows(
        self, operand: Tensor, joint: Joint, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The projection plus `residual` as rows, and its low-rank product."""
        low = self.low(operand, joint)
        size = (self._rows, joint.frozen.out_features)
        update = _update(low, joint)
        return backward.updated_rows(operand, _panels(joint), update, size, residual), low

    def inner(self, operand: Tensor, joint: Joint) -> tuple[Tensor, Tensor | None]:
        """The projection as tiles, and its low-rank product."""
        low = self.low(operand, joint)
        return backward.updated_tiles(operand, _panels(joint), _update(low, joint)), low

    def gated(self, joined: Tensor) -> Tensor:
        """Tiles of act(gate) * up."""
        return backward.gated_tiles(joined, self._gelu)

    def rows_back(self, gradient: Tensor, joint: Joint, low: Tensor | None) -> Tensor:
        """d/d(input) of a projection, as rows."""
        size = (self._rows, joint.frozen.in_features)
        return backward.updated_rows(gradient, _back_panels(joint), _back_update(low, joint), size)

    def gate_back(
        self, gradient: Tensor, joint: Joint, low: Tensor | None, joined: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tiles of d/d(joined) through the gate and the projection, and of `gated`."""
        update = _back_update(low, joint)
        return backward.gate_gradients(gradient, _back_panels(joint), update, joined, self._gelu)

    def pairs(
        self,
        entering: Tensor,
        low: Tensor | None,
        gradient: Tensor,
        low_gradient: Tensor | None,
        joint: Joint,
        found: PairGradients,
    ) -> None:
        """Gradients of the adapter's matrices."""
        if low is not None and low_gradient is not None:
            a = backward.thin_product(low_gradient, entering)
            found.update(joint.split(a, backward.thin_product(low, gradient)))

    def attend(self, turned: Tensor) -> tuple[Tensor, ...]:
        """Attention of turned rows, and what `attend_back` needs."""
        return (*backward.dense_attention(turned, self._shape), turned)

    def attend_back(self, attended: tuple[Tensor, ...], gradient: Tensor) -> Tensor:
        """d/d(turned), dense."""
        mixed, sums, turned = attended
        return backward.dense_attention_gradient(turned, (mixed, sums), gradient, self._shape)


def _pack(weight: Tensor) -> Panels:
    return Panels(kernels.pack_weight(weight.contiguous()), None)


def _update(low: Tensor | None, joint: Joint) -> Update | None:
    return Update(low, _pack(joint.b).packed) if low is not None else None


def _back_update(low: Tensor | None, joint: Joint) -> Update | None:
    return Update(low, _pack(joint.a.t()).packed) if low is not None else None


def _panels(joint: Joint) -> Panels:
    weights: Any = joint.frozen.weights
    return weights.panels


def _back_panels(joint: Joint) -> Panels:
    weights: Any = joint.frozen.backward_weights()
    return weights.panels
