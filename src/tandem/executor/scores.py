"""Summed log-probabilities of given tokens and, for recorded spans, their gradient's start.

Rows of all spans that want a sum share the head's products, a piece at a time. Invariant: no
[tokens, vocabulary] float32 tensor of a long sample exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from tandem.core.plan import Span
from tandem.executor.batch import Batch
from tandem.executor.recorder import Recorder
from tandem.model.head import Head
from tandem.model.transfer import Fetched, indices


def wants_sum(span: Span) -> bool:
    """Whether the sum of a span's scores is computed here."""
    return bool(span.score_targets) and (span.score_top is None or span.record is not None)


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Sums by place in a batch, whose terms are on their way from the device. `counts` says how
    many terms each has."""

    counts: dict[int, int]
    logprobs: Fetched | None

    def get(self) -> dict[int, float]:
        """Sums by place. Waits for the device."""
        if self.logprobs is None:
            return dict.fromkeys(self.counts, 0.0)
        values = iter(self.logprobs.get().tolist())
        return {place: _sum(islice(values, count)) for place, count in self.counts.items()}


def sum_scores(
    head: Head,
    hidden: Tensor,
    batch: Batch,
    recorder: Recorder | None,
    before_piece: Callable[[], None] = lambda: None,
) -> ScoreSums:
    """Sums of all places that want one. `before_piece` may raise; nothing was recorded then."""
    counts: dict[int, int] = {}
    logprobs: list[Tensor] = []
    for recorded in (False, True):
        places = [
            place
            for place, span in enumerate(batch.spans)
            if wants_sum(span) and (span.record is not None) == recorded
        ]
        rows = _Rows.of(batch, places)
        counts |= rows.counts
        logprobs += _score(head, hidden, rows, recorder if recorded else None, before_piece)
    return ScoreSums(counts, Fetched(torch.cat(logprobs)) if logprobs else None)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a batch and their targets, place by place; `offsets` are those within the spans."""

    offsets: dict[int, list[int]]
    rows: list[int]
    targets: list[int]

    @staticmethod
    def of(batch: Batch, places: list[int]) -> _Rows:
        """All rows of the spans at `places` that have a target."""
        offsets, rows, targets = {}, [], []
        for place in places:
            wanted, first = batch.spans[place].score_targets, batch.first_rows[place]
            offsets[place] = [row for row, target in enumerate(wanted) if target >= 0]
            rows += [first + row for row in offsets[place]]
            targets += [wanted[row] for row in offsets[place]]
        return _Rows(offsets, rows, targets)

    @property
    def counts(self) -> dict[int, int]:
        """Rows by place."""
        return {place: len(offsets) for place, offsets in self.offsets.items()}


def _score(
    head: Head,
    hidden: Tensor,
    rows: _Rows,
    recorder: Recorder | None,
    before_piece: Callable[[], None],
) -> list[Tensor]:
    """Log-probabilities of the rows' targets, in pieces; slopes go to the recorder."""
    if not rows.rows:
        return []
    device, piece = hidden.device, head.rows_at_once(hidden.device)
    picked, wanted = indices(rows.rows + rows.targets, device).split(len(rows.rows))
    logprobs: list[Tensor] = []
    slopes: list[Tensor] = []
    for some, targets in zip(picked.split(piece), wanted.split(piece), strict=True):
        before_piece()
        found, slope = head.score(
            hidden.index_select(0, some), targets, gradient=recorder is not None
        )
        logprobs.append(found)
        if slope is not None:
            slopes.append(slope)
    if recorder is not None:
        recorder.slopes(rows.offsets, torch.cat(slopes))
    return logprobs


def _sum(values: Iterable[float]) -> float:
    """Their sum; nan if one is no finite number."""
    found = list(values)
    return math.fsum(found) if all(map(math.isfinite, found)) else math.nan
