"""Runs one batch: forward pass, then the head on the rows that are drawn from or scored.

Rows that nobody asked about never meet the head. Scores are computed a few rows at a time, so no
[tokens, vocabulary] float32 tensor of a long prompt exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.plan import Draw, DrawResult, ScoreResult, Span, TokenLogprob
from tandem.executor.batch import Batch
from tandem.executor.kv_storage import KVStorage
from tandem.model.attention.base import PagedContext
from tandem.model.load import LoadedModel
from tandem.model.logprobs import token_logprobs
from tandem.model.sampling import sample

# Logits of one piece of a score take at most this many bytes in float32.
_SCORE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SpanOutcome:
    """Results of one span; `draws[i]` is None where sequence i's logits were not finite."""

    draws: list[DrawResult | None]
    score: ScoreResult | None
    score_failed: bool


def run_batch(model: LoadedModel, storage: KVStorage, batch: Batch) -> list[SpanOutcome]:
    """Outcomes of the batch's spans, in row order. KV of all rows is written."""
    context = PagedContext(model.kernel.prepare(batch.layout), storage.layers)
    # Never inference_mode: its tensors could not be recorded for a later backward.
    with torch.no_grad():
        model.lora.activate(batch.segments)
        try:
            hidden = model.hidden(batch.tokens, batch.positions, context)
        finally:
            model.lora.activate(())
        drawn = _draw_all(model, hidden, batch)
        return [
            _outcome(model, hidden, span, first, drawn[place])
            for place, (span, first) in enumerate(zip(batch.spans, batch.first_rows, strict=True))
        ]


def _draw_all(model: LoadedModel, hidden: Tensor, batch: Batch) -> list[list[DrawResult | None]]:
    """Results of all draws by span: one head product and one sampling call for the batch."""
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
    results = iter(sample(logits, draws))
    return [[next(results) for _ in span.draws] for span in batch.spans]


def _outcome(
    model: LoadedModel, hidden: Tensor, span: Span, first: int, draws: list[DrawResult | None]
) -> SpanOutcome:
    targets = span.score_targets
    if not targets:
        return SpanOutcome(draws, None, False)
    piece = max(1, _SCORE_BYTES // (4 * model.vocab_size))
    found: list[TokenLogprob] = []
    for start in range(0, len(targets), piece):
        some = targets[start : start + piece]
        logits = model.head(hidden[first + start : first + start + len(some)])
        for logprob in token_logprobs(logits, some, [span.score_top] * len(some)):
            if logprob is None:
                return SpanOutcome(draws, None, True)
            found.append(logprob)
    return SpanOutcome(draws, ScoreResult(span.seq_id, span.start, tuple(found)), False)


def _pick(rows: Tensor, wanted: list[int]) -> Tensor:
    if wanted == list(range(rows.shape[0])):
        return rows
    return rows.index_select(0, torch.tensor(wanted, device=rows.device))
