"""Which rows of a batch are read after the last layer."""

from __future__ import annotations

import torch

from tandem.core.plan import Draw, RecordTarget, Span
from tandem.core.sampling import SamplingParams
from tandem.executor.batch import build_batch
from tandem.executor.forward import wanted_rows

CPU = torch.device("cpu")
DRAW = (Draw(1, 0, 0, SamplingParams()),)
TOKENS = tuple(range(8))
BLOCKS = ((0, 1),)


def wanted(*spans: Span) -> list[int] | None:
    rows = wanted_rows(build_batch(spans, 4, torch.float32), CPU)
    return None if rows is None else rows.tolist()


def test_what_is_drawn_from_scored_or_recorded_is_wanted() -> None:
    drawn = Span(1, 0, TOKENS, BLOCKS, draws=DRAW)
    unread = Span(2, 0, TOKENS, BLOCKS)
    scored = Span(3, 0, TOKENS, BLOCKS, score_targets=(-1, 5, -1, 0, -1, -1, -1))
    both = Span(4, 0, TOKENS, BLOCKS, draws=DRAW, score_targets=(-1,) * 7 + (2,))
    recorded = Span(5, 0, TOKENS[:2], BLOCKS, record=RecordTarget(0, 0))
    assert wanted(drawn) == [7]
    assert wanted(unread) == []
    assert wanted(drawn, unread, scored, both, recorded) == [7, 17, 19, 31, 32, 33]


def test_all_rows_are_where_few_are_left_over() -> None:
    one = Span(1, 3, (7,), BLOCKS, draws=DRAW)
    assert wanted(one, one) is None
    assert wanted(one, Span(2, 0, TOKENS[:2], BLOCKS, draws=DRAW)) is None
    assert wanted(Span(5, 0, TOKENS, BLOCKS, record=RecordTarget(0, 0))) is None
