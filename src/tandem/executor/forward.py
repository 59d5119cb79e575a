"""Runs one batch: the forward pass, then the head on rows that are drawn from or scored.

Other rows do not reach the head. Scores are computed a few rows at a time. Invariant: no [tokens,
vocabulary] float32 tensor of a long prompt exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.plan import Draw, DrawResult, ScoreResult, TokenLogprob
from tandem.core.ports import Urgent, never
from tandem.executor.batch import Batch
from tandem.executor.kv_storage import KVStorage
from tandem.executor.recorder import Recorder
from tandem.executor.scores import sum_scores
from tandem.model.attention.base import PagedContext
from tandem.model.load import LoadedModel
from tandem.model.logprobs import token_logprobs
from tandem.model.sampling import sample


@dataclass(frozen=True, slots=True)
class SpanOutcome:
    """Results of one span. `draws[i]` is a reason if sequence i could not draw (see `sample`)."""

    draws: list[DrawResult | str]
    score: ScoreResult | None
    score_failed: bool


class GaveWay(Exception):
    """A preemptible pass ended before its last layer, because something urgent came."""


def run_batch(
    model: LoadedModel,
    storage: KVStorage,
    batch: Batch,
    recorder: Recorder | None,
    urgent: Urgent = never,
) -> list[SpanOutcome]:
    """Outcomes of the batch's spans, in row order. Writes the KV of all rows, unless the pass keeps
    graphs.

    `recorder` takes the recorded rows; it is None if no span is recorded. Raises `GaveWay` as soon
    as `urgent` returns true before a layer or a piece of the head. What was recorded in the pass
    does not count then.
    """

    def check() -> None:
        if urgent():
            raise GaveWay

    context = PagedContext(
        model.kernel.prepare(batch.layout),
        storage.layers,
        wanted_rows(batch, model.device),
        recorder.inner if recorder is not None else None,
    )
    # Never inference_mode: its tensors could not be recorded for a later backward.
    with torch.no_grad():
        model.lora.activate(batch.segments)
        try:
            with _recording(model, recorder), _watching(model, None if urgent is never else check):
                # Layers computed for a backward need the rows without padding.
                pad = recorder is None or recorder.graphs is None
                hidden = model.hidden(batch.tokens, batch.positions, context, pad=pad)
        finally:
            model.lora.activate(())
        drawn = _draw_all(model, hidden, batch)
        totals = sum_scores(model.head, hidden, batch, recorder, check)
        outcomes = [
            _outcome(model, hidden, batch, place, drawn[place], totals.get(place))
            for place in range(len(batch.spans))
        ]
    if recorder is not None:
        recorder.finish()
    return outcomes


def wanted_rows(batch: Batch, device: torch.device) -> Tensor | None:
    """Rows whose hidden states are read after the last layer, int64 in order.

    None means all rows, also if leaving out the others would gain little.
    """
    total = batch.tokens.numel()
    wanted: list[int] = []
    if total == len(batch.spans):
        return None
    for span, first in zip(batch.spans, batch.first_rows, strict=True):
        rows = len(span.tokens)
        if span.record is not None:
            wanted += range(first, first + rows)
            continue
        asked = {row for row, target in enumerate(span.score_targets) if target >= 0}
        if span.draws:
            asked.add(rows - 1)
        wanted += [first + row for row in sorted(asked)]
    if 2 * len(wanted) > total:
        return None
    return torch.tensor(wanted, dtype=torch.int64, device=device)


def _recording(model: LoadedModel, recorder: Recorder | None) -> AbstractContextManager[None]:
    if recorder is None:
        return nullcontext()
    assert model.stack is not None
    graphs = recorder.graphs
    return model.stack.recording(recorder.take, graphs.layer if graphs is not None else None)


def _watching(
    model: LoadedModel, before_layer: Callable[[], None] | None
) -> AbstractContextManager[None]:
    if before_layer is None or model.stack is None:
        return nullcontext()
    return model.stack.watching(before_layer)


def _draw_all(model: LoadedModel, hidden: Tensor, batch: Batch) -> list[list[DrawResult | str]]:
    """Results of all draws by span, with one head product and one sampling call for the batch."""
    last_rows: list[int] = []
    draws: list[Draw] = []
    sources: list[int] = []
    for span, first in zip(batch.spans, batch.first_rows, strict=True):
        if span.draws:
            sources.extend([len(last_rows)] * len(span.draws))
            last_rows.append(first + len(span.tokens) - 1)
            draws.extend(span.draws)
    if not draws:
        return [[] for _ in batch.spans]
    logits = model.head(_pick(hidden, last_rows))
    if len(sources) > len(last_rows):
        logits = _pick(logits, sources)
    results = iter(sample(logits, draws, model.grammars))
    return [[next(results) for _ in span.draws] for span in batch.spans]


def _outcome(
    model: LoadedModel,
    hidden: Tensor,
    batch: Batch,
    place: int,
    draws: list[DrawResult | str],
    total: float | None,
) -> SpanOutcome:
    """The results of a span. `total` is the sum of its scores, if that was computed already."""
    span, first = batch.spans[place], batch.first_rows[place]
    if total is not None and not math.isfinite(total):
        return SpanOutcome(draws, None, True)
    if not span.score_targets or (span.score_top is None and total is not None):
        score = None if total is None else ScoreResult(span.seq_id, span.start, (), total)
        return SpanOutcome(draws, score, False)
    rows = [row for row, target in enumerate(span.score_targets) if target >= 0]
    found: list[TokenLogprob] = []
    top, piece = span.score_top or 0, model.head.logits_at_once(hidden.device)
    for start in range(0, len(rows), piece):
        some = rows[start : start + piece]
        logits = model.head(_pick(hidden[first : first + len(span.tokens)], some))
        targets = [span.score_targets[row] for row in some]
        for logprob in token_logprobs(logits, targets, [top] * len(some)):
            if logprob is None:
                return SpanOutcome(draws, None, True)
            found.append(logprob)
    if total is None:
        total = math.fsum(each.logprob for each in found)
    return SpanOutcome(draws, ScoreResult(span.seq_id, span.start, tuple(found), total), False)


def _pick(rows: Tensor, wanted: list[int]) -> Tensor:
    if wanted == list(range(rows.shape[0])):
        return rows
    return rows.index_select(0, torch.tensor(wanted, device=rows.device))
