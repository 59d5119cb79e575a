"""Computes recorded rows layer by layer and keeps what their gradient needs, while memory lasts.

Works only in a pass of nothing but whole micro-batches, with each sequence in one span. Keys of
earlier chunks would carry no gradient, and other rows go through the model's own layers (`inner`
keeps what those leave). Writes nothing to the KV cache, since a sequence that was recorded to its
end is never continued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tandem.executor.batch import Batch
from tandem.model.transfer import to_device
from tandem.training.layerwise import LayerReplay
from tandem.training.recordings import Recording, Recordings


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows first:end of the pass are those of `recording`."""

    first: int
    end: int
    recording: Recording
    replay: LayerReplay


class GraphKeeper:
    """Keeps graphs during one forward pass."""

    def __init__(self, recordings: Recordings, parts: list[_Part]) -> None:
        self._recordings = recordings
        self._parts = parts

    def layer(self, index: int, hidden: Tensor) -> list[Tensor] | None:
        """Output of layer `index` for `hidden` [rows, width], in parts. None if the model's own
        layer has to compute it."""
        found = []
        for part in self._parts:
            done = part.replay.forward_by_hand(index, hidden[part.first : part.end])
            if done is None:
                return None
            self._recordings.keep_graph(part.recording, index, done[1])
            found.append(done[0])
        return found


def graph_keeper(
    recordings: Recordings, batch: Batch, prepare: Callable[[Recording], LayerReplay]
) -> GraphKeeper | None:
    """The keeper of a pass, or None if the pass is not made of whole micro-batches. `prepare` makes
    the replay of all rows of a recording whose tokens are known."""
    if not recordings.keeps_graphs or any(span.record is None for span in batch.spans):
        return None
    parts: list[_Part] = []
    at = 0
    while at < len(batch.spans):
        target = batch.spans[at].record
        assert target is not None
        recording = recordings.get(target.micro_batch)
        assert recording is not None
        wanted = [s for s, length in enumerate(recording.lengths) if length]
        spans = batch.spans[at : at + len(wanted)]
        for sequence, span in zip(wanted, spans, strict=False):
            where = span.record
            assert where is not None
            whole = span.start == 0 and len(span.tokens) == recording.lengths[sequence]
            if (where.micro_batch, where.sequence) != (
                recording.micro_batch,
                sequence,
            ) or not whole:
                return None
        if len(spans) != len(wanted):
            return None
        first = batch.first_rows[at]
        end = first + recording.num_rows
        recordings.drop_graphs(recording)
        recording.tokens.copy_(to_device(batch.tokens[first:end], recording.tokens.device))
        parts.append(_Part(first, end, recording, prepare(recording)))
        at += len(wanted)
    return GraphKeeper(recordings, parts)
