"""Many LoRA adapters in one flattened batch.

Rows of one adapter are consecutive. How updates are added is chosen when the model is loaded: one
adapter after the other on views of its rows (`EagerUpdates`), or all with two launches (`gpu`). A
batch without adapters costs nothing. Invariant: every adapter has its own tensors, so writing one
in place never affects what another's pending backward reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tandem.model.kernels.layer import PackedLora
from tandem.model.lora_files import LinearShape, Lora, LoraWeights

# Packs the halves `a` and `b` of some layers with their factors.
PackLora = Callable[[Sequence[tuple[Tensor, Tensor]], Sequence[float]], PackedLora]


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start:stop` of the batch use adapter `key`."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows by adapter on the device. `table` int32 [tiles, 4]: the first row, the number of rows
    (at most `height`; 0: the tile is not in use), the adapter's slot, and how many tiles are in
    use. Those come first."""

    height: int
    table: Tensor


class ReservedTiles(Protocol):
    """Tiles at a fixed place for passes of up to a number of rows: what a captured pass reads."""

    @property
    def tiles(self) -> Tiles:
        """As many tiles as the rows can need. `fill` sets them."""
        ...

    def fill(self, segments: Sequence[Segment]) -> None:
        """Use `segments` in work that is submitted from now on: one asynchronous copy."""
        ...


@dataclass(slots=True)
class ActiveSegments:
    """What the wrapped layers of one model apply in the current forward pass.

    `tiles` are those of the segments, made when first needed, or reserved ones without segments.
    """

    segments: tuple[Segment, ...] = ()
    tiles: Tiles | None = None

    @property
    def empty(self) -> bool:
        """Whether the pass has no adapters."""
        return not self.segments and self.tiles is None


class JointUpdate(Protocol):
    """The adapters' updates of some layers that read the same input, in a fixed order."""

    def update(self, x: Tensor, out: Tensor, *, settled: bool = False) -> None:
        """For `x` [rows, in], add to `out` [rows, sum of out], the layers' outputs side by side.

        Writes in place, not differentiable. Does nothing without active segments. Rows may have any
        stride, columns are consecutive. `settled`: the kernel that was launched last does not let
        another one begin before `x` is complete, and no memory that was freed after its launch is
        its own; so what only reads `x` may run beside it.
        """
        ...


class AdapterUpdates(Protocol):
    """How the updates of all adapters of one model are added: chosen when the model is loaded."""

    @property
    def generation(self) -> int:
        """Changes whenever passes captured before must not be replayed any more."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of tables and copies, without the adapters' own tensors."""
        ...

    def group(self, layers: Sequence[LoraLinear], active: ActiveSegments) -> JointUpdate:
        """The joint update of `layers`, which must read the same input."""
        ...

    def add(self, key: str) -> None:
        """Layers have the new weights of adapter `key`, which is not known here yet."""
        ...

    def drop(self, key: str) -> None:
        """Forget adapter `key`, if it is known."""
        ...

    def reserve(self, rows: int) -> ReservedTiles | None:
        """Tiles for captured passes; None if passes with adapters cannot be captured."""
        ...


class EagerUpdates:
    """One adapter after the other: two small products on a view of its rows. For any device.

    The low-rank product and the update are rounded to the weights' type.
    """

    generation = 0
    nbytes = 0

    def group(self, layers: Sequence[LoraLinear], active: ActiveSegments) -> JointUpdate:
        """See `AdapterUpdates`."""
        return _EagerUpdate(tuple(layers), active)

    def add(self, key: str) -> None:
        """See `AdapterUpdates`."""

    def drop(self, key: str) -> None:
        """See `AdapterUpdates`."""

    def reserve(self, rows: int) -> ReservedTiles | None:
        """See `AdapterUpdates`."""
        return None


@dataclass(frozen=True, slots=True)
class _EagerUpdate:
    layers: tuple[LoraLinear, ...]
    active: ActiveSegments

    def update(self, x: Tensor, out: Tensor, *, settled: bool = False) -> None:
        """See `JointUpdate`."""
        for segment in self.active.segments:
            length, column = segment.stop - segment.start, 0
            rows = x.narrow(0, segment.start, length)
            for layer in self.layers:
                width = layer.shape.outputs
                if (weights := layer.weights(segment.key)) is not None:
                    part = out.narrow(0, segment.start, length).narrow(1, column, width)
                    part.add_(linear(linear(rows, weights.a), weights.b), alpha=weights.scale)
                column += width


@dataclass(frozen=True, slots=True)
class _Packing:
    """The packed form of some layers' weights, valid while the layers have these weights."""

    weights: tuple[LoraWeights | None, ...]
    packed: PackedLora


class LoraLinear(nn.Module):
    """A frozen layer plus each segment's adapter update on the rows of that segment."""

    def __init__(
        self, base: nn.Module, shape: LinearShape, active: ActiveSegments, updates: AdapterUpdates
    ) -> None:
        super().__init__()
        self.base = base
        self.shape = shape
        self._active = active
        self._weights: dict[str, LoraWeights] = {}
        self._packings: dict[str, _Packing] = {}
        self._update = updates.group((self,), active)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [1, rows, in] -> [1, rows, out]."""
        out: Tensor = self.base(x)
        if self._active.empty:
            return out
        if torch.is_grad_enabled():
            return self._recorded(x, out)
        self._update.update(x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]))
        return out

    def _recorded(self, x: Tensor, out: Tensor) -> Tensor:
        """The update for autograd: out of place, since autograd may keep `out`."""
        for segment in self._active.segments:
            weights = self._weights.get(segment.key)
            if weights is None:
                continue
            # A backward has a single adapter.
            assert segment.stop - segment.start == x.shape[-2]
            update = linear(linear(x, weights.a), weights.b)
            out = torch.add(out, update, alpha=weights.scale)
        return out

    def weights(self, key: str) -> LoraWeights | None:
        """What adapter `key` does to this layer; None if it leaves the layer as it is."""
        return self._weights.get(key)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Adapters of the rows in the current pass; empty if only `base` applies."""
        return self._active.segments

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's adapters, including packed copies for joined products."""
        own = sum(each.a.nbytes + each.b.nbytes for each in self._weights.values())
        return own + sum(each.packed.nbytes for each in self._packings.values())

    def packed(self, key: str, by: PackLora, others: Sequence[LoraLinear] = ()) -> PackedLora:
        """The update of adapter `key` for this layer and the `others` of its joined product.

        Packed `by` a function on first use, and again after `put` changed one of them.
        """
        layers = (self, *others)
        weights = tuple(layer._weights.get(key) for layer in layers)
        known = self._packings.get(key)
        if known is None or any(a is not b for a, b in zip(known.weights, weights, strict=True)):
            known = _Packing(weights, _pack(layers, weights, by))
            self._packings[key] = known
        return known.packed

    def put(self, key: str, weights: LoraWeights) -> None:
        """Use `weights` for rows of adapter `key`."""
        self._weights[key] = weights

    def drop(self, key: str) -> None:
        """Forget adapter `key`, if this layer has it."""
        self._weights.pop(key, None)
        self._packings.pop(key, None)


def _pack(
    layers: Sequence[LoraLinear], weights: Sequence[LoraWeights | None], by: PackLora
) -> PackedLora:
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
    return by(halves, [each.scale if each is not None else 1.0 for each in weights])


class LoraLayers:
    """All adaptable layers of one model by name, and the adapters that they hold."""

    def __init__(
        self,
        model: nn.Module,
        linears: Mapping[str, LinearShape],
        updates: AdapterUpdates | None = None,
    ) -> None:
        """Wraps each layer of `linears` in place. The layers may be packed already. Without
        `updates` they are `EagerUpdates`."""
        self.linears = dict(linears)
        self._updates: AdapterUpdates = EagerUpdates() if updates is None else updates
        self._active = ActiveSegments()
        self._layers: dict[str, LoraLinear] = {}
        self._loaded: set[str] = set()
        for name, shape in self.linears.items():
            parent, _, child = name.rpartition(".")
            owner = model.get_submodule(parent)
            base = owner.get_submodule(child)
            wrapped = LoraLinear(base, shape, self._active, self._updates)
            setattr(owner, child, wrapped)
            self._layers[name] = wrapped

    def __contains__(self, key: object) -> bool:
        return key in self._loaded

    def add(self, key: str, adapter: Lora) -> None:
        """Make `adapter` usable as `key`, replacing an earlier one.

        Tensors are replaced, not written, so a pending backward keeps those that it has read.
        """
        self.drop(key)
        try:
            for name, weights in adapter.items():
                self._layers[name].put(key, weights)
            self._updates.add(key)
        except BaseException:
            self.drop(key)
            raise
        self._loaded.add(key)

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters."""
        return sum(layer.nbytes for layer in self._layers.values()) + self._updates.nbytes

    def drop(self, key: str) -> None:
        """Forget `key`. Does nothing if it is not loaded.

        Its tensors may be freed while a device still has work that reads them: all work goes to one
        stream, and their memory is given out again in the order of that stream.
        """
        self._updates.drop(key)
        for layer in self._layers.values():
            layer.drop(key)
        self._loaded.discard(key)

    def group(self, layers: Sequence[LoraLinear]) -> JointUpdate:
        """The joint update of some of these layers, which must read the same input.

        Make it once, when the model is loaded.
        """
        return self._updates.group(layers, self._active)

    @property
    def generation(self) -> int:
        """Changes whenever passes that were captured before must not be replayed any more."""
        return self._updates.generation

    def reserve(self, rows: int) -> ReservedTiles | None:
        """Tiles for captured passes of up to `rows` rows, valid in the current `generation`. None
        if passes with adapters cannot be captured."""
        return self._updates.reserve(rows)

    def activate(self, segments: tuple[Segment, ...]) -> None:
        """Set which rows of the next forward pass use which adapter."""
        self._active.segments, self._active.tiles = segments, None

    def activate_reserved(self, reserved: ReservedTiles) -> None:
        """Let the next forward pass, one that is captured, read the reserved tiles."""
        self._active.segments, self._active.tiles = (), reserved.tiles


def adaptable_linears(backbone: nn.Module, prefix: str) -> dict[str, LinearShape]:
    """Every plain linear layer of `backbone`, by its name in the whole model.

    Layers of single experts are left out: a router sends them only some of the rows, reordered.
    """
    return {
        f"{prefix}{name}": LinearShape(module.in_features, module.out_features)
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear) and "experts" not in name.split(".")
    }
