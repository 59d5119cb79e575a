"""Runs one batch: the layers, then the head on rows that are drawn from or scored.

Other rows do not reach the head. Scores are computed a few rows at a time. Invariant: no [tokens,
vocabulary] float32 tensor of a long prompt exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.core.plan import Draw, DrawResult, ScoreResult, TokenLogprob
from tandem.core.ports import Urgent, never
from tandem.executor.batch import Batch
from tandem.executor.kv_storage import KVStorage
from tandem.executor.recorder import Recorder
from tandem.executor.scores import ScoreSums, sum_scores
from tandem.model.attention.base import PagedContext
from tandem.model.load import LoadedModel
from tandem.model.logprobs import token_logprobs
from tandem.model.sampling import Best, Drawing
from tandem.model.transfer import indices

# The largest float16.
_MOST_HALF = 65504.0


@dataclass(frozen=True, slots=True)
class SpanOutcome:
    """Results of one span. `draws[i]` is a reason if sequence i could not draw (see `sample`)."""

    draws: list[DrawResult | str]
    score: ScoreResult | None
    score_failed: bool


class Preempted(Exception):
    """A preemptible pass ended before its last layer, because something urgent came."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a pass left on the device. Valid until the next pass, but for what was drawn from it.

    `hidden` is [rows, width]. A pass that also computed the head for all rows has `logits` [rows,
    vocab] and the `best` of each.
    """

    hidden: Tensor
    logits: Tensor | None = None
    best: Best | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that a pass draws, int64 [draws] on the device, and the row of each sequence."""

    tokens: Tensor
    rows: dict[int, int]

    def of(self, seq_ids: list[int]) -> Tensor:
        """Of these sequences, in order. Any token where none was drawn."""
        tokens = _pick(self.tokens, [self.rows[seq_id] for seq_id in seq_ids])
        return tokens.clamp_min(0)


class CapturedPass(Protocol):
    """A recorded pass that can compute one batch."""

    def compute(self, batch: Batch, recorder: Recorder | None) -> Computed:
        """Compute the layers of `batch`, which is on the host."""
        ...


class RunningBatch:
    """A batch that was given to the device. Nothing waits for it before `outcomes`."""

    def __init__(
        self,
        model: LoadedModel,
        batch: Batch,
        computed: Computed,
        recorder: Recorder | None,
        before_piece: Callable[[], None],
    ) -> None:
        """Gives the device what follows the layers: draws, and sums of scores. `before_piece` may
        raise."""
        self._model, self._batch, self._hidden = model, batch, computed.hidden
        self._scored = any(span.score_targets for span in batch.spans)
        self._outcomes: list[SpanOutcome] | None = None
        with torch.no_grad():
            self._drawing = _draw_all(model, computed, batch)
            self._sums = ScoreSums({}, None)
            if self._scored:
                self._sums = sum_scores(model.head, self._hidden, batch, recorder, before_piece)

    @property
    def drawn(self) -> Drawn:
        """What it draws, before it is known on the host."""
        draws = [draw for span in self._batch.spans for draw in span.draws]
        tokens = self._drawing.on_device if self._drawing is not None else self._batch.tokens[:0]
        return Drawn(tokens, {draw.seq_id: row for row, draw in enumerate(draws)})

    def outcomes(self) -> list[SpanOutcome]:
        """Outcomes of the batch's spans, in row order. Log-probabilities of draws and alternatives
        are computed only now: few requests ask for them. To be called before another pass, unless
        tokens are all that is wanted."""
        if self._outcomes is None:
            self._outcomes = self._find()
        return self._outcomes

    def _find(self) -> list[SpanOutcome]:
        drawn = iter(self._drawing.results() if self._drawing is not None else ())
        outcomes = self._outcomes_of(drawn)
        self._add_states(outcomes)
        return outcomes

    def _outcomes_of(self, drawn: Iterator[DrawResult | str]) -> list[SpanOutcome]:
        totals = self._sums.get()
        if not self._scored:
            return [
                SpanOutcome([next(drawn) for _ in span.draws], None, False)
                for span in self._batch.spans
            ]
        with torch.no_grad():
            return [
                _outcome(
                    self._model,
                    self._hidden,
                    self._batch,
                    place,
                    [next(drawn) for _ in span.draws],
                    totals.get(place),
                )
                for place, span in enumerate(self._batch.spans)
            ]

    def _add_states(self, outcomes: list[SpanOutcome]) -> None:
        """Give the first draws of spans their rows, where these are asked for."""
        batch, wanted = self._batch, list[tuple[DrawResult, int]]()
        for span, first, outcome in zip(batch.spans, batch.first_rows, outcomes, strict=True):
            drawn = outcome.draws[0] if span.draws and span.draws[0].state else ""
            if not isinstance(drawn, str):
                wanted.append((drawn, first + len(span.tokens) - 1))
        if not wanted:
            return
        with torch.no_grad():
            rows = _pick(self._hidden, [row for _, row in wanted])
            states = rows.float().clamp(-_MOST_HALF, _MOST_HALF).half().cpu().numpy()
        for (drawn, _), state in zip(wanted, states, strict=True):
            drawn.state = state.tobytes()


def run_batch(
    model: LoadedModel,
    storage: KVStorage,
    batch: Batch,
    recorder: Recorder | None,
    urgent: Urgent = never,
    captured: CapturedPass | None = None,
) -> RunningBatch:
    """Give the batch to the device. Writes the KV of all rows, unless the pass keeps graphs.

    `recorder` takes the recorded rows; it is None if no span is recorded. `captured` computes the
    layers, if a captured pass can. Raises `Preempted` as soon as `urgent` returns true before a
    layer or a piece of the head; a captured pass is one piece. What was recorded in the pass does
    not count then.
    """

    def check() -> None:
        if urgent():
            raise Preempted

    if captured is not None:
        check()
        computed = captured.compute(batch, recorder)
    else:
        watch = None if urgent is never else check
        computed = compute_layers(model, storage, batch.on(model.device), recorder, watch)
    running = RunningBatch(model, batch, computed, recorder, check)
    if recorder is not None:
        recorder.finish()
    return running


def compute_layers(
    model: LoadedModel,
    storage: KVStorage,
    batch: Batch,
    recorder: Recorder | None,
    before_layer: Callable[[], None] | None,
) -> Computed:
    """All layers, one kernel after the other. `before_layer` may raise."""
    inner = recorder.inner if recorder is not None else None
    context = PagedContext(
        model.kernel.prepare(batch.layout),
        storage.layers,
        wanted_rows(batch, model.device),
        inner,
        inner.writer(batch.num_rows, model.device) if inner is not None else None,
    )
    # Never inference_mode: its tensors could not be recorded for a later backward.
    with torch.no_grad():
        model.lora.activate(batch.segments)
        try:
            with _recording(model, recorder), _watching(model, before_layer):
                # Layers computed for a backward need the rows without padding.
                pad = recorder is None or recorder.graphs is None
                return Computed(model.hidden(batch.tokens, batch.positions, context, pad=pad))
        finally:
            model.lora.activate(())


def wanted_rows(batch: Batch, device: torch.device) -> Tensor | None:
    """Rows whose hidden states are read after the last layer, int64 in order.

    None means all rows, also if leaving out the others would gain little.
    """
    total = batch.num_rows
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
    return indices(wanted, device)


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


def _draw_all(model: LoadedModel, computed: Computed, batch: Batch) -> Drawing | None:
    """All draws, with one head product and one sampling call for the batch."""
    if computed.logits is not None and all(len(span.draws) == 1 for span in batch.spans):
        # The usual pass of decodes: row, span and draw have the same number.
        each = [span.draws[0] for span in batch.spans]
        return Drawing(computed.logits, each, model.grammars, computed.best)
    last_rows: list[int] = []
    draws: list[Draw] = []
    sources: list[int] = []
    for span, first in zip(batch.spans, batch.first_rows, strict=True):
        if span.draws:
            sources.extend([len(last_rows)] * len(span.draws))
            last_rows.append(first + len(span.tokens) - 1)
            draws.extend(span.draws)
    if not draws:
        return None
    if computed.logits is not None and computed.best is not None:
        logits, best, sources = computed.logits, computed.best, [last_rows[at] for at in sources]
    else:
        logits, best = model.head(_pick(computed.hidden, last_rows)), None
    if sources != list(range(logits.shape[0])):
        wanted = indices(sources, logits.device)
        logits = logits.index_select(0, wanted)
        best = best.pick(wanted) if best is not None else None
    return Drawing(logits, draws, model.grammars, best)


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
    return rows.index_select(0, indices(wanted, rows.device))
