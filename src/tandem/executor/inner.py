"""Keeps what the model's own kernels compute inside the inner layers of recorded rows.

This is the larger part of what a backward slice would compute again, and it costs little to write
during the forward. For a micro-batch it is kept from the first pass on or not at all. Kernels for
CPUs write tiles into memory of each micro-batch; those for GPUs give rows, which are copied into
one arena by a table of places. Invariant: every pass that records some of its rows writes them,
whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.executor.batch import Batch
from tandem.executor.kv_storage import lazy_zeros
from tandem.model.attention.base import InnerRows
from tandem.model.kernels.layer import Exports
from tandem.model.layer_gradient import Inner, inner_widths
from tandem.model.load import LoadedModel
from tandem.model.transfer import to_device
from tandem.training.recordings import Recording, Recordings

# Allocates memory for a layer's rows; None if its kernels export nothing.
MakeRoom = Callable[[int, int], Inner | None]


class InnerArena:
    """`GraphRows` of `Inner`, for layers whose kernels export rows."""

    def __init__(self, middle: Tensor, gate_up: Tensor) -> None:
        """[layers, rows, columns] each."""
        self.middle, self.gate_up = middle, gate_up

    @property
    def rows(self) -> int:
        """See `GraphRows`."""
        return self.middle.shape[1]

    @property
    def nbytes(self) -> int:
        """See `GraphRows`."""
        return self.middle.nbytes + self.gate_up.nbytes

    def graph(self, layer: int, first: int, rows: int) -> Inner:
        """See `GraphRows`."""
        part = slice(first, first + rows)
        return Inner(self.middle[layer, part], self.gate_up[layer, part])


class RowWriter:
    """`InnerRows` of one pass: writes rows to `places` of the arena, int64 on the device (-1:
    nowhere). `layers` are those that gave theirs."""

    def __init__(self, arena: InnerArena, places: Tensor) -> None:
        self._arena, self._places = arena, places
        self.layers: set[int] = set()

    def __call__(self, layer: int, middle: Tensor, gate_up: Tensor) -> None:
        """See `InnerRows`."""
        from tandem.model.gpu.record import keep_rows

        keep_rows(middle, self._places, self._arena.middle[layer])
        keep_rows(gate_up, self._places, self._arena.gate_up[layer])
        self.layers.add(layer)


def inner_arena(model: LoadedModel, most_rows: int, budget: int) -> InnerArena | None:
    """An arena of up to `budget` bytes for at most `most_rows` rows. None if the layers do not
    export rows, or none would fit."""
    assert model.stack is not None
    found = {inner_widths(tap.module) for tap in model.stack.taps}
    widths = found.pop()
    if found or widths is None:
        return None
    layers = model.stack.num_layers
    rows = min(most_rows, budget // (layers * sum(widths) * model.dtype.itemsize))
    if rows <= 0:
        return None
    made = [lazy_zeros((layers, rows, width), model.device, model.dtype) for width in widths]
    return InnerArena(*made)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows first:end of the pass are rows of `recording` from `place` on."""

    first: int
    end: int
    recording: Recording
    place: int


class InnerKeeper:
    """Keeps the inner layers of one forward pass: an `InnerSink`, or with `arena` what tells a
    `RowWriter` the places. A layer that exports nothing in the pass is dropped."""

    def __init__(self, parts: list[_Part], arena: InnerArena | None) -> None:
        self._parts, self._arena = parts, arena
        self._heard: set[int] = set()
        self._writer: RowWriter | None = None

    def exports(self, layer: int, middle: Tensor) -> Exports:
        """Where layer `layer` writes its recorded rows. Copies `middle` at once; see
        `InnerSink`."""
        self._heard.add(layer)
        found = Exports()
        for part in self._parts:
            inner = part.recording.graphs.get(layer)
            if isinstance(inner, Inner):
                rows = slice(part.place, part.place + part.end - part.first)
                inner.middle[rows] = middle[0, part.first : part.end]
                found.ranges.extend((part.first, part.end, part.place))
                found.tiles.append(inner.gate_up)
        return found

    def places(self, rows: int) -> Tensor:
        """The row of the arena for each of the pass's `rows` rows, int64 on the host; -1: none."""
        places = torch.full((rows,), -1, dtype=torch.int64)
        for part in self._parts:
            first = part.recording.first_row
            assert first is not None
            at = first + part.place
            places[part.first : part.end] = torch.arange(at, at + part.end - part.first)
        return places

    def writer(self, rows: int, device: torch.device) -> InnerRows | None:
        """What takes the rows of a pass that is computed layer by layer."""
        if self._arena is None:
            return None
        self._writer = RowWriter(self._arena, to_device(self.places(rows), device))
        return self._writer

    def hear(self, layers: Iterable[int]) -> None:
        """These layers have written their rows."""
        self._heard.update(layers)

    def finish(self) -> None:
        """The pass has run: drop layers that exported nothing."""
        if self._writer is not None:
            self.hear(self._writer.layers)
        for part in self._parts:
            graphs = part.recording.graphs
            for layer in [each for each in graphs if each not in self._heard]:
                del graphs[layer]


def inner_keeper(
    recordings: Recordings, batch: Batch, room: MakeRoom, arena: InnerArena | None
) -> InnerKeeper | None:
    """The keeper of a pass through the model's own layers; None if nothing can be kept. `arena` is
    that of the recordings."""
    parts: list[_Part] = []
    for span, first in zip(batch.spans, batch.first_rows, strict=True):
        if span.record is None:
            continue
        recording = recordings.get(span.record.micro_batch)
        assert recording is not None
        if not any(recording.done):
            _make_room(recordings, recording, room)
        if recording.graphs:
            place = recording.starts[span.record.sequence] + span.start
            parts.append(_Part(first, first + len(span.tokens), recording, place))
    return InnerKeeper(parts, arena) if parts else None


def _make_room(recordings: Recordings, recording: Recording, room: MakeRoom) -> None:
    """Allocate upper layers first, since their backward comes first."""
    if recording.graphs:
        return
    recordings.place_graphs(recording)
    if not recordings.keeps_graphs:
        return
    for layer in reversed(range(recordings.num_layers)):
        inner = room(layer, recording.num_rows)
        if inner is not None:
            recordings.keep_graph(recording, layer, inner)
        if layer not in recording.graphs:
            return
