"""Flattening: order of rows, tables, adapter segments."""

from __future__ import annotations

import numpy as np
import torch

from tandem.core.plan import Span
from tandem.executor.batch import build_batch
from tandem.model.lora import Segment


def test_rows_are_grouped_by_adapter_and_decode_comes_first():
    spans = [
        Span(1, 0, (10, 11, 12), ((4, 9),), adapter="b"),
        Span(2, 5, (20,), ((1, 3, 8),)),
        Span(3, 2, (30, 31), ((6,),)),
        Span(4, 7, (40,), ((2, 5),), adapter="b"),
        Span(5, 0, (50,), ((7,),), adapter="a"),
    ]
    batch = build_batch(spans, 4, torch.float32)
    assert [span.seq_id for span in batch.spans] == [2, 3, 5, 4, 1]
    assert [spans[place] for place in batch.order] == batch.spans
    assert batch.first_rows == [0, 1, 3, 4, 5]
    assert batch.tokens.tolist() == [20, 30, 31, 50, 40, 10, 11, 12]
    assert batch.positions.tolist() == [5, 2, 3, 0, 7, 0, 1, 2]
    assert batch.segments == (Segment("a", 3, 4), Segment("b", 4, 8))
    # Blocks that cover the span alone, padded with its own first block.
    expected = [[1, 3], [6, 6], [7, 7], [2, 5], [4, 4]]
    assert np.array_equal(batch.layout.tables, expected)


def test_a_base_batch_has_no_segments():
    batch = build_batch([Span(1, 0, (5,), ((0,),))], 4, torch.float32)
    assert batch.segments == ()


def test_a_batch_of_decodes_is_laid_out_as_beside_a_prompt():
    """Nothing but decodes takes a way of its own, with the same result."""
    decodes = [
        Span(1, 9, (20,), ((1, 3, 8),), adapter="b"),
        Span(2, 2, (30,), ((6,),)),
        Span(3, 7, (40,), ((2, 5),), adapter="a"),
        Span(4, 0, (50,), ((7,),)),
    ]
    alone = build_batch(decodes, 4, torch.float32)
    beside = build_batch([*decodes, Span(5, 0, (1, 2), ((9,),), adapter="z")], 4, torch.float32)
    assert alone.order == beside.order[:-1] == [1, 3, 2, 0]
    assert alone.first_rows == beside.first_rows[:-1]
    for name in ("tokens", "positions"):
        assert getattr(alone, name).tolist() == getattr(beside, name).tolist()[:-2]
    assert alone.layout.slots.tolist() == beside.layout.slots.tolist()[:-2]
    assert np.array_equal(alone.layout.tables, beside.layout.tables[:-1])
    for name in ("starts", "lengths"):
        assert np.array_equal(getattr(alone.layout, name), getattr(beside.layout, name)[:-1])
    assert alone.segments == beside.segments[:-1]
