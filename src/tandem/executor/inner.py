"""Keeps what the model's own kernels compute inside the inner layers of recorded rows.

This is the larger part of what a backward slice would compute again, and it costs little to write
during the forward. For a micro-batch it is kept from the first pass on or not at all. Invariant:
every pass that records some of its rows writes them, whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem.executor.batch import Batch
from tandem.model.kernels.layer import Exports
from tandem.model.layer_gradient import Inner
from tandem.training.recordings import Recording, Recordings

# Allocates memory for a layer's rows; None if its kernels export nothing.
MakeRoom = Callable[[int, int], Inner | None]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows first:end of the pass are rows of `recording` from `place` on."""

    first: int
    end: int
    recording: Recording
    place: int


class InnerKeeper:
    """An `InnerSink` for one forward pass. A layer that exports nothing in the pass is dropped."""

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        self._heard: set[int] = set()

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

    def finish(self) -> None:
        """The pass has run: drop layers that exported nothing."""
        for part in self._parts:
            graphs = part.recording.graphs
            for layer in [each for each in graphs if each not in self._heard]:
                del graphs[layer]


def inner_keeper(recordings: Recordings, batch: Batch, room: MakeRoom) -> InnerKeeper | None:
    """The keeper of a pass through the model's own layers; None if nothing can be kept."""
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
    return InnerKeeper(parts) if parts else None


def _make_room(recordings: Recordings, recording: Recording, room: MakeRoom) -> None:
    """Allocate upper layers first, since their backward comes first."""
    if not recordings.keeps_graphs or recording.graphs:
        return
    for layer in reversed(range(recordings.num_layers)):
        inner = room(layer, recording.num_rows)
        if inner is not None:
            recordings.keep_graph(recording, layer, inner)
        if layer not in recording.graphs:
            return
