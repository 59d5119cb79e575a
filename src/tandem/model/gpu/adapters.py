"""The adapters of a model as a table on the device, and tiles of rows that name places in it.

Adapters keep their own tensors; loading or replacing one only writes its entries. What writes the
table and what reads it goes to one stream, so work that was submitted earlier reads the entries of
then. Invariant: an adapter keeps its slot while it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.model.gpu.lora import FIELDS, MEMBERS, RANK_STEP, AdapterTable, Joint, add_updates
from tandem.model.lora import ActiveSegments, JointUpdate, LoraLinear, ReservedTiles, Segment, Tiles
from tandem.model.lora_files import LoraWeights

# Rows of a tile: the least that matrix units take, and more in passes of many rows.
_LOW, _HIGH, _MANY_ROWS = 16, 64, 256
_LEAST_SLOTS, _LEAST_RANK = 8, 16
_ALIGNMENT = 16


@dataclass(slots=True)
class _Adapter:
    slot: int
    # What entries point to, by layer, and copies among it.
    read: dict[LoraLinear, LoraWeights] = field(default_factory=dict)
    copied_bytes: int = 0


class TableUpdates:
    """`AdapterUpdates` with two launches for all adapters of a pass."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        # Hopper's programmatic dependent launch hides a part of both launches.
        overlap = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        entries = torch.zeros(_LEAST_SLOTS, 0, MEMBERS, FIELDS, dtype=torch.int64, device=device)
        self._table = AdapterTable(entries, _LEAST_RANK, overlap)
        self._generation = 0
        self._groups: list[tuple[LoraLinear, ...]] = []
        self._adapters: dict[str, _Adapter] = {}

    @property
    def generation(self) -> int:
        """See `AdapterUpdates`: how often the table was made anew."""
        return self._generation

    @property
    def nbytes(self) -> int:
        """Bytes of the table and of copies."""
        copied = sum(each.copied_bytes for each in self._adapters.values())
        return self._table.entries.nbytes + copied

    def group(self, layers: Sequence[LoraLinear], active: ActiveSegments) -> JointUpdate:
        """See `AdapterUpdates`. Costs a new table if there is one with adapters already."""
        assert 0 < len(layers) <= MEMBERS
        assert len({layer.shape.inputs for layer in layers}) == 1
        self._groups.append(tuple(layers))
        widths = tuple(layer.shape.outputs for layer in layers)
        return _TableUpdate(self, active, Joint(len(self._groups) - 1, widths))

    def add(self, key: str) -> None:
        """See `AdapterUpdates`. The adapter gets the lowest slot that is free."""
        assert key not in self._adapters
        taken = {each.slot for each in self._adapters.values()}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self._adapters[key] = _Adapter(slot)
        entries = self._entries(key)
        ranks = [weights.a.shape[0] for weights in self._adapters[key].read.values()]
        table = self.table(slot + 1, max(ranks, default=0))
        table.entries[slot].copy_(_staged(entries, self._device), non_blocking=True)

    def drop(self, key: str) -> None:
        """See `AdapterUpdates`. Its entries stay until another adapter gets the slot."""
        self._adapters.pop(key, None)

    def table(self, slots: int = 0, rank: int = 0) -> AdapterTable:
        """The table, made anew if it lacks groups, slots or ranks."""
        old = self._table
        capacity, bound = old.entries.shape[0], old.rank
        while capacity < slots:
            capacity *= 2
        while bound < rank:
            bound *= 2
        shape = (capacity, len(self._groups), MEMBERS, FIELDS)
        if bound == old.rank and shape == old.entries.shape:
            return old
        # Nothing can have read a table without groups.
        self._generation += int(old.entries.shape[1] > 0)
        entries = np.zeros(shape, dtype=np.int64)
        for key, adapter in self._adapters.items():
            entries[adapter.slot] = self._entries(key)
        sent = _staged(entries, self._device).to(self._device, non_blocking=True)
        self._table = replace(old, entries=sent, rank=bound)
        return self._table

    def tiles(self, segments: Sequence[Segment], rows: int) -> Tiles:
        """Tiles for one pass of `rows` rows."""
        height = _height(rows)
        table = _staged(self.cut(segments, height), self._device)
        return Tiles(height, table.to(self._device, non_blocking=True))

    def reserve(self, rows: int) -> ReservedTiles:
        """See `AdapterUpdates`."""
        slots, height = self.table().entries.shape[0], _height(rows)
        # Each segment has at most one tile that is not full.
        most = min(rows, slots + rows // height)
        table = torch.zeros(most, 4, dtype=torch.int32, device=self._device)
        return _Reserved(self, Tiles(height, table), self._generation)

    def cut(self, segments: Sequence[Segment], height: int) -> np.ndarray:
        """The table of `Tiles`. Rows of adapters that are not loaded are in no tile."""
        found = [
            (start, min(height, segment.stop - start), self._adapters[segment.key].slot)
            for segment in segments
            if segment.key in self._adapters
            for start in range(segment.start, segment.stop, height)
        ]
        table = np.full((len(found), 4), len(found), dtype=np.int32)
        table[:, :3] = np.array(found, dtype=np.int32).reshape(-1, 3)
        return table

    def _entries(self, key: str) -> np.ndarray:
        """The adapter's entries, int64 [groups, MEMBERS, FIELDS]."""
        entries = np.zeros((len(self._groups), MEMBERS, FIELDS), dtype=np.int64)
        for group, layers in enumerate(self._groups):
            for member, layer in enumerate(layers):
                if (weights := self._readable(key, layer)) is None:
                    continue
                a, b = weights.a.data_ptr(), weights.b.data_ptr()
                entries[group, member] = (a, b, weights.a.shape[0], _bits(weights.scale))
        return entries

    def _readable(self, key: str, layer: LoraLinear) -> LoraWeights | None:
        """The adapter's own tensors, or copies if kernels could not read these as they are."""
        adapter, weights = self._adapters[key], layer.weights(key)
        if weights is None or layer in adapter.read:
            return adapter.read.get(layer)
        assert weights.a.dtype == weights.b.dtype == self._dtype
        a, b = weights.a.detach(), weights.b.detach()
        if more := -a.shape[0] % RANK_STEP:
            a, b = pad(a, (0, 0, 0, more)), pad(b, (0, more))
        read = LoraWeights(_aligned(a), _aligned(b), weights.scale)
        for half, own in ((read.a, weights.a), (read.b, weights.b)):
            adapter.copied_bytes += half.nbytes if half.data_ptr() != own.data_ptr() else 0
        adapter.read[layer] = read
        return read


@dataclass(frozen=True, slots=True)
class _TableUpdate:
    updates: TableUpdates
    active: ActiveSegments
    joint: Joint

    def update(self, x: Tensor, out: Tensor, *, settled: bool = False) -> None:
        """See `JointUpdate`."""
        active = self.active
        if active.empty:
            return
        if active.tiles is None:
            active.tiles = self.updates.tiles(active.segments, x.shape[0])
        if active.tiles.table.shape[0]:
            table = self.updates.table()
            add_updates(x, out, active.tiles, table, self.joint, settled=settled)


@dataclass(frozen=True, slots=True)
class _Reserved:
    updates: TableUpdates
    tiles: Tiles
    generation: int

    def fill(self, segments: Sequence[Segment]) -> None:
        """See `ReservedTiles`."""
        assert self.generation == self.updates.generation, "reserve again"
        found = self.updates.cut(segments, self.tiles.height)
        table = np.zeros(self.tiles.table.shape, dtype=np.int32)
        table[: len(found)] = found
        self.tiles.table.copy_(_staged(table, self.tiles.table.device), non_blocking=True)


def tried(device: torch.device, dtype: torch.dtype) -> TableUpdates:
    """Updates for a model, after both kernels gave the right result once. Raises if they do not.

    The first call compiles them, which takes seconds and may fail in any way.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = ((_LOW, 64), (_LEAST_RANK, 64), (128, _LEAST_RANK), (_LOW, 128))
    x, a, b, out = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    expected = out.double() + (x.double() @ a.double().t() @ b.double().t()) / 32
    updates = TableUpdates(device, dtype)
    entry = [a.data_ptr(), b.data_ptr(), _LEAST_RANK, _bits(1 / 32)]
    entries = torch.zeros(1, 1, MEMBERS, FIELDS, dtype=torch.int64)
    entries[0, 0, 0] = torch.tensor(entry)
    table = replace(updates.table(), entries=entries.to(device))
    tiles = Tiles(_LOW, torch.tensor([[0, _LOW, 0, 1]], dtype=torch.int32).to(device))
    add_updates(x, out, tiles, table, Joint(0, (128,)), settled=False)
    if not torch.allclose(out.double(), expected, rtol=2e-2, atol=2e-2):
        raise RuntimeError("the update of an adapter is wrong")
    return updates


def _bits(scale: float) -> int:
    return int(np.float32(scale).view(np.int32))


def _height(rows: int) -> int:
    return _HIGH if rows > _MANY_ROWS else _LOW


def _staged(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy from which `device` can copy asynchronously.

    It may be dropped at once: torch gives pinned memory out again after the copies from it.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _aligned(matrix: Tensor) -> Tensor:
    matrix = matrix.contiguous()
    return matrix.clone() if matrix.data_ptr() % _ALIGNMENT else matrix
