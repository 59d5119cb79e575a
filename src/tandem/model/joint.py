"""Frozen projections of the same input as one product, with the adapter's updates.

Knows no arithmetic. Invariant: what is joined are the weights that the adapter had when the joint
was made, so a joint belongs to one revision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tandem.model.linear import AmxWeight, PackedLinear
from tandem.model.lora_files import LoraWeights

# d/d(a), d/d(b) by the module's name.
PairGradients = dict[str, tuple[Tensor | None, Tensor | None]]
STEP = 32


@dataclass(frozen=True, slots=True)
class Member:
    """Columns start:end of a joint projection. Its update has columns low:low + rank."""

    name: str
    start: int
    end: int
    low: int
    rank: int
    scale: float


class Joint:
    """Projections side by side, with all their updates as one.

    Ranks are padded to a multiple of `step`; there are none without an adapter. The joined matrices
    are made when they are first read, and kept.
    """

    def __init__(
        self,
        frozen: PackedLinear,
        parts: Sequence[tuple[str, int, int]],
        adapter: Mapping[str, LoraWeights],
        step: int = STEP,
    ) -> None:
        """`parts` are (name, first column, end column) of each projection."""
        self.frozen = frozen
        self.members: list[Member] = []
        self._weights = {name: adapter[name] for name, _, _ in parts if name in adapter}
        low = 0
        for name, start, end in parts:
            weights = self._weights.get(name)
            rank = weights.a.shape[0] if weights is not None else 0
            scale = weights.scale if weights is not None else 1.0
            self.members.append(Member(name, start, end, low, rank, scale))
            low += rank
        self.ranks = -(-low // step) * step

    @cached_property
    def a(self) -> Tensor:
        """[ranks, in]."""
        halves = [each.a.detach() for each in self._weights.values()]
        if more := self.ranks - sum(len(half) for half in halves):
            halves.append(halves[0].new_zeros(more, self.frozen.in_features))
        return halves[0] if len(halves) == 1 else torch.cat(halves)

    @cached_property
    def b(self) -> Tensor:
        """[out, ranks]."""
        return self._joined_b(scaled=False)

    @cached_property
    def scaled_b(self) -> Tensor:
        """[out, ranks], times each update's factor."""
        return self._joined_b(scaled=True)

    @cached_property
    def scale(self) -> Tensor:
        """float32 [ranks]: the factors."""
        scale = torch.zeros(self.ranks, device=self.a.device)
        for each in self.members:
            scale[each.low : each.low + each.rank] = each.scale
        return scale

    @property
    def nbytes(self) -> int:
        """Bytes of the joined matrices that exist now."""
        found = [self.__dict__.get(name) for name in ("a", "b", "scaled_b")]
        return sum(each.nbytes for each in found if each is not None)

    def _joined_b(self, *, scaled: bool) -> Tensor:
        joined = self.a.new_zeros(self.frozen.out_features, self.ranks)
        for each in self.members:
            if each.rank:
                part = joined[each.start : each.end, each.low : each.low + each.rank]
                b = self._weights[each.name].b.detach()
                torch.mul(b, each.scale if scaled else 1.0, out=part)
        return joined

    def split(self, a: Tensor, b: Tensor) -> PairGradients:
        """Gradients by name from those of `a` and of `b` transposed, each [ranks, ...]."""
        found: PairGradients = {}
        for each in self.members:
            if each.rank:
                columns = slice(each.low, each.low + each.rank)
                found[each.name] = (a[columns], b[columns, each.start : each.end].t())
        return found


def tiled(projections: Sequence[PackedLinear], head_dim: int) -> bool:
    """Whether `TileArithmetic` can compute these projections."""
    widths = [width for each in projections for width in (each.in_features, each.out_features)]
    return (
        all(isinstance(each.weights, AmxWeight) for each in projections)
        and all(width % STEP == 0 for width in widths)
        and head_dim % STEP == 0
    )
