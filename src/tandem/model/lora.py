"""Many LoRA adapters in one flattened batch.

Rows of one adapter are consecutive, so each adapter costs two small products per layer on a view of
its rows. A batch without adapters costs nothing. Invariant: every adapter has its own tensors, so
writing one in place never affects what another's pending backward reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tandem.model.kernels.layer import PackedLora
from tandem.model.lora_files import LinearShape, Lora, LoraWeights


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start:stop` of the batch use adapter `key`."""

    key: str
    start: int
    stop: int


@dataclass(slots=True)
class ActiveSegments:
    """The segments that the wrapped layers of one model apply in the current forward pass."""

    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class _Packing:
    """The packed form of some layers' weights, valid while the layers have these weights."""

    weights: tuple[LoraWeights | None, ...]
    packed: PackedLora


class LoraLinear(nn.Module):
    """A frozen layer plus each segment's adapter update on the rows of that segment."""

    def __init__(self, base: nn.Module, active: ActiveSegments) -> None:
        super().__init__()
        self.base = base
        self._active = active
        self._weights: dict[str, LoraWeights] = {}
        self._packings: dict[str, _Packing] = {}

    def forward(self, x: Tensor) -> Tensor:
        """`x` [1, rows, in] -> [1, rows, out]."""
        out: Tensor = self.base(x)
        for segment in self._active.segments:
            weights = self._weights.get(segment.key)
            if weights is None:
                continue
            length = segment.stop - segment.start
            low = linear(x.narrow(-2, segment.start, length), weights.a)
            update = linear(low, weights.b)
            if torch.is_grad_enabled():
                # Out of place, since autograd may keep `out`. A backward has a single adapter.
                assert length == x.shape[-2]
                out = torch.add(out, update, alpha=weights.scale)
            else:
                out.narrow(-2, segment.start, length).add_(update, alpha=weights.scale)
        return out

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Adapters of the rows in the current pass; empty if only `base` applies."""
        return self._active.segments

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's adapters, including packed copies for joined products."""
        own = sum(each.a.nbytes + each.b.nbytes for each in self._weights.values())
        return own + sum(each.packed.nbytes for each in self._packings.values())

    def packed(self, key: str, others: Sequence[LoraLinear] = ()) -> PackedLora:
        """The update of adapter `key` for this layer and the `others` of its joined product.

        Packed on first use, and again after `put` changed one of them.
        """
        layers = (self, *others)
        weights = tuple(layer._weights.get(key) for layer in layers)
        known = self._packings.get(key)
        if known is None or any(a is not b for a, b in zip(known.weights, weights, strict=True)):
            known = _Packing(weights, _pack(layers, weights))
            self._packings[key] = known
        return known.packed

    def put(self, key: str, weights: LoraWeights) -> None:
        """Use `weights` for rows of adapter `key`."""
        self._weights[key] = weights

    def drop(self, key: str) -> None:
        """Forget adapter `key`, if this layer has it."""
        self._weights.pop(key, None)
        self._packings.pop(key, None)


def _pack(layers: Sequence[LoraLinear], weights: Sequence[LoraWeights | None]) -> PackedLora:
    like = next((each.a for each in weights if each is not None), torch.empty(0).bfloat16())
    halves: list[tuple[Tensor, Tensor]] = []
    for layer, each in zip(layers, weights, strict=True):
        if each is None:
            shape: Any = layer.base
            halves.append(
                (like.new_empty(0, shape.in_features), like.new_empty(shape.out_features, 0))
            )
        else:
            halves.append((each.a.detach().contiguous(), each.b.detach().contiguous()))
    return PackedLora.of(halves, [each.scale if each is not None else 1.0 for each in weights])


class LoraLayers:
    """All adaptable layers of one model by name, and the adapters that they hold."""

    def __init__(self, model: nn.Module, linears: Mapping[str, LinearShape]) -> None:
        """Wraps each layer of `linears` in place. The layers may be packed already."""
        self.linears = dict(linears)
        self._active = ActiveSegments()
        self._layers: dict[str, LoraLinear] = {}
        self._loaded: set[str] = set()
        for name in self.linears:
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            wrapped = LoraLinear(owner.get_submodule(child), self._active)
            setattr(owner, child, wrapped)
            self._layers[name] = wrapped

    def __contains__(self, key: object) -> bool:
        return key in self._loaded

    def add(self, key: str, adapter: Lora) -> None:
        """Make `adapter` usable as `key`, replacing an earlier one.

        Tensors are replaced, not written, so a pending backward keeps those that it has read.
        """
        self.drop(key)
        for name, weights in adapter.items():
            self._layers[name].put(key, weights)
        self._loaded.add(key)

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters."""
        return sum(layer.nbytes for layer in self._layers.values())

    def drop(self, key: str) -> None:
        """Forget `key`. Does nothing if it is not loaded."""
        for layer in self._layers.values():
            layer.drop(key)
        self._loaded.discard(key)

    def activate(self, segments: tuple[Segment, ...]) -> None:
        """Set which rows of the next forward pass use which adapter."""
        self._active.segments = segments


def adaptable_linears(backbone: nn.Module, prefix: str) -> dict[str, LinearShape]:
    """Every plain linear layer of `backbone`, by its name in the whole model.

    Layers of single experts are left out: a router sends them only some of the rows, reordered.
    """
    return {
        f"{prefix}{name}": LinearShape(module.in_features, module.out_features)
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear) and "experts" not in name.split(".")
    }
