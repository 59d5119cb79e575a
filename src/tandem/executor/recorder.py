"""Copies the recorded rows of one batch to the arena during its forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.core.plan import Span
from tandem.executor.batch import Batch
from tandem.executor.graphs import GraphKeeper
from tandem.executor.inner import InnerKeeper
from tandem.model.transfer import indices
from tandem.training.recordings import Recording, Recordings


class Recorder:
    """Records one forward pass. All recorded spans of `batch` passed
    `TrainingState.span_problem`."""

    def __init__(
        self,
        recordings: Recordings,
        batch: Batch,
        graphs: GraphKeeper | None = None,
        inner: InnerKeeper | None = None,
    ) -> None:
        self.graphs, self.inner = graphs, inner
        self._recordings = recordings
        self._spans: dict[int, tuple[Span, int, Recording]] = {}
        self._targets: list[tuple[int, int, Tensor]] = []
        for place, (span, first) in enumerate(zip(batch.spans, batch.first_rows, strict=True)):
            if span.record is None:
                continue
            recording = recordings.get(span.record.micro_batch)
            assert recording is not None
            self._spans[place] = (span, first, recording)
            arena = recordings.rows(recording)
            if arena is not None:
                start = recording.starts[span.record.sequence] + span.start
                rows = arena[:, start : start + len(span.tokens)]
                self._targets.append((first, first + len(span.tokens), rows))

    def take(self, layer: int, hidden: Tensor) -> None:
        """`RowSink`: keep the recorded rows of `hidden` [rows, width]."""
        for start, stop, rows in self._targets:
            rows[layer - 1].copy_(hidden[start:stop])

    def places(self, rows: int) -> Tensor:
        """The row of the arena for each of the pass's `rows` rows, int64 on the host; -1: none.

        A pass that records so keeps no graphs, hence none of its recordings has any.
        """
        places = torch.full((rows,), -1, dtype=torch.int64)
        for span, first, recording in self._spans.values():
            assert span.record is not None
            self._recordings.drop_graphs(recording)
            if recording.first_row is not None:
                at = recording.first_row + recording.starts[span.record.sequence] + span.start
                count = len(span.tokens)
                places[first : first + count] = torch.arange(at, at + count)
        return places

    def slopes(self, place: int, offsets: Sequence[int], slopes: Tensor) -> None:
        """Keep d(log p)/d(hidden) [len(offsets), width] for rows of the span at `place`."""
        span, _, recording = self._spans[place]
        assert span.record is not None
        if recording.slopes is None:
            recording.slopes = torch.zeros(
                recording.num_rows, slopes.shape[1], dtype=slopes.dtype, device=slopes.device
            )
        first = recording.starts[span.record.sequence] + span.start
        where = indices([first + offset for offset in offsets], slopes.device)
        recording.slopes.index_copy_(0, where, slopes)

    def abandon(self) -> None:
        """The pass was preempted: none of it counts."""
        for _, _, recording in self._spans.values():
            if not any(recording.done):
                self._recordings.drop_graphs(recording)

    def finish(self) -> None:
        """The pass has run: its rows are recorded now."""
        if self.inner is not None:
            self.inner.finish()
        for span, _, recording in self._spans.values():
            assert span.record is not None
            sequence = span.record.sequence
            first = recording.starts[sequence] + span.start
            end = first + len(span.tokens)
            recording.tokens[first:end] = indices(list(span.tokens), recording.tokens.device)
            recording.done[sequence] = max(recording.done[sequence], span.end)
