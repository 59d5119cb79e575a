"""Summed log-probabilities of given tokens and, for recorded spans, their gradient's start.

Rows of all spans that want a sum share the head's products, a piece at a time. Invariant: no
[tokens, vocabulary] float32 tensor of a long sample exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
    """Sums of the spans at `places` of a batch, on their way from the device."""

    places: list[int]
    sums: Fetched

    def get(self) -> dict[int, float]:
        """Sums by place. Waits for them."""
        return dict(zip(self.places, self.sums.get().tolist(), strict=True))


def sum_scores(
    head: Head,
    hidden: Tensor,
    batch: Batch,
    recorder: Recorder | None,
    before_piece: Callable[[], None] = lambda: None,
) -> list[ScoreSums]:
    """Sums of all places that want one. `before_piece` may raise; nothing was recorded then."""
    totals: list[ScoreSums] = []
    for recorded in (False, True):
        places = [
            place
            for place, span in enumerate(batch.spans)
            if wants_sum(span) and (span.record is not None) == recorded
        ]
        if places:
            taking = recorder if recorded else None
            totals.append(_sum_some(head, hidden, batch, places, taking, before_piece))
    return totals


def _sum_some(
    head: Head,
    hidden: Tensor,
    batch: Batch,
    places: list[int],
    recorder: Recorder | None,
    before_piece: Callable[[], None],
) -> ScoreSums:
    offsets = {
        place: [row for row, target in enumerate(batch.spans[place].score_targets) if target >= 0]
        for place in places
    }
    rows = [batch.first_rows[place] + row for place in places for row in offsets[place]]
    targets = [batch.spans[place].score_targets[row] for place in places for row in offsets[place]]
    piece = head.rows_at_once(hidden.device)
    logprobs: list[Tensor] = []
    slopes: list[Tensor] = []
    for start in range(0, len(rows), piece):
        before_piece()
        picked = indices(rows[start : start + piece], hidden.device)
        wanted = indices(targets[start : start + piece], hidden.device)
        scores, slope = head.score(
            hidden.index_select(0, picked), wanted, gradient=recorder is not None
        )
        logprobs.append(scores)
        if slope is not None:
            slopes.append(slope)
    counts = [len(offsets[place]) for place in places]
    found = torch.cat(logprobs) if logprobs else hidden.new_empty(0)
    sums = torch.stack([part.sum() for part in found.double().split(counts)])
    if recorder is not None and slopes:
        for place, part in zip(places, torch.cat(slopes).split(counts), strict=True):
            if offsets[place]:
                recorder.slopes(place, offsets[place], part)
    return ScoreSums(places, Fetched(sums))
