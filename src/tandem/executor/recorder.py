"""Copies the recorded rows of one forward pass to the arena, and notes what was recorded.

Knows no model and no scheduling. Invariant: rows count as recorded only after `finish`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.core.plan import Span
from tandem.executor.batch import Batch
from tandem.executor.graphs import GraphKeeper
from tandem.executor.inner import InnerKeeper
from tandem.model.transfer import indices, to_device
from tandem.training.recordings import Recording, Recordings


@dataclass(frozen=True, slots=True)
class _Range:
    """Rows first:end of the pass are rows of `recording` from `at` on."""

    recording: Recording
    first: int
    end: int
    at: int


def _joined(ranges: list[_Range]) -> list[_Range]:
    """The same rows in as few ranges as possible: each costs one copy a layer."""
    found: list[_Range] = []
    for each in ranges:
        last = found[-1] if found else None
        if (
            last is not None
            and last.recording is each.recording
            and (last.end, last.at + last.end - last.first) == (each.first, each.at)
        ):
            found[-1] = replace(last, end=each.end)
        else:
            found.append(each)
    return found


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
        self._tokens = batch.tokens
        self._spans: dict[int, tuple[Span, int, Recording]] = {}
        self._targets: list[tuple[int, int, Tensor]] = []
        ranges: list[_Range] = []
        for place, (span, first) in enumerate(zip(batch.spans, batch.first_rows, strict=True)):
            if span.record is None:
                continue
            recording = recordings.get(span.record.micro_batch)
            assert recording is not None
            self._spans[place] = (span, first, recording)
            at = recording.starts[span.record.sequence] + span.start
            ranges.append(_Range(recording, first, first + len(span.tokens), at))
        for each in _joined(ranges):
            arena = recordings.rows(each.recording)
            if arena is not None:
                rows = arena[:, each.at : each.at + each.end - each.first]
                self._targets.append((each.first, each.end, rows))

    def take(self, layer: int, hidden: Tensor) -> None:
        """`RowSink`: keep the recorded rows of `hidden` [rows, width]."""
        for start, stop, rows in self._targets:
            rows[layer - 1].copy_(hidden[start:stop])

    def claim_places(self, rows: int) -> Tensor:
        """The row of the arena for each of the pass's `rows` rows, int64 on the host; -1: none.

        Drops the graphs of the recordings, unless `inner` keeps them.
        """
        places = torch.full((rows,), -1, dtype=torch.int64)
        for span, first, recording in self._spans.values():
            assert span.record is not None
            if self.inner is None:
                self._recordings.drop_graphs(recording)
            if recording.first_row is not None:
                at = recording.first_row + recording.starts[span.record.sequence] + span.start
                count = len(span.tokens)
                places[first : first + count] = torch.arange(at, at + count)
        return places

    def slopes(self, offsets: Mapping[int, Sequence[int]], slopes: Tensor) -> None:
        """Keep d(log p)/d(hidden) [rows, width] for some rows of the spans at these places, one
        place after the other."""
        rows: list[int] = []
        for place, wanted in offsets.items():
            span, _, recording = self._spans[place]
            assert span.record is not None
            first = recording.starts[span.record.sequence] + span.start
            rows += [first + row for row in wanted]
        counts = [len(wanted) for wanted in offsets.values()]
        to = indices(rows, slopes.device).split(counts)
        for place, some, part in zip(offsets, to, slopes.split(counts), strict=True):
            _, _, recording = self._spans[place]
            if recording.slopes is None:
                recording.slopes = slopes.new_zeros(recording.num_rows, slopes.shape[1])
            recording.slopes.index_copy_(0, some, part)

    def abandon(self) -> None:
        """The pass was preempted: drop the graphs of recordings that had nothing done before."""
        for _, _, recording in self._spans.values():
            if not any(recording.done):
                self._recordings.drop_graphs(recording)

    def finish(self) -> None:
        """The pass has run: its rows are recorded now."""
        if self.inner is not None:
            self.inner.finish()
        tokens: Tensor | None = None
        for span, row, recording in self._spans.values():
            assert span.record is not None
            if tokens is None:
                tokens = to_device(self._tokens, recording.tokens.device)
            sequence, count = span.record.sequence, len(span.tokens)
            first = recording.starts[sequence] + span.start
            recording.tokens[first : first + count] = tokens[row : row + count]
            recording.done[sequence] = max(recording.done[sequence], span.end)
