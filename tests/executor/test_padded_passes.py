"""Rows that are added to a pass for the sake of the matrix kernels: nothing shows of them."""

from __future__ import annotations

import random

import pytest
import torch

import tiny_models
from tandem.core.plan import Draw, Span
from tandem.core.sampling import SamplingParams
from tandem.core.training import Role, TrainingSequence
from tandem.model.linear import OneDnnWeight, compiled_rows
from tandem.model.product_choice import PackingChoice
from training_harness import (
    BLOCK,
    Driver,
    gentle,
    make_executor,
    open_trainer,
    our_gradients,
    worst_error,
)

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here"
)
ROWS = (50, 37)
TOLERANCE = 1e-5
COEFFICIENTS = (1.0, -0.5)


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """Only its products are faster with some numbers of rows."""
    choice = PackingChoice("onednn", OneDnnWeight)
    monkeypatch.setattr("tandem.model.load.choose_for", lambda *_: choice)


def executor_of(pads: bool, heights: list[int], graph_bytes: int = 0):
    """One that notes how many rows its layers see."""
    executor = make_executor(gentle("qwen3"), "auto", graph_bytes=graph_bytes)
    assert executor._model.pads
    executor._model.pads = pads
    backbone = executor._model.backbone
    backbone.register_forward_pre_hook(
        lambda _module, _args, given: heights.append(given["input_ids"].numel()),
        with_kwargs=True,
    )
    return executor


def spans() -> list[Span]:
    rng, found, block = random.Random(0), [], 3
    for seq_id, rows in enumerate(ROWS):
        tokens = tuple(rng.randrange(3, tiny_models.VOCAB) for _ in range(rows))
        table = tuple(range(block, block + -(-(rows + 1) // BLOCK)))
        block += len(table)
        draws = (Draw(seq_id, 0, 0, SamplingParams(temperature=0.0)),)
        found.append(Span(seq_id, 0, tokens, (table,), draws=draws, score_targets=tokens[1:]))
    return found


def test_a_padded_pass_says_and_stores_the_same():
    seen = []
    for pads in (False, True):
        heights: list[int] = []
        executor = executor_of(pads, heights)
        first = Driver(executor).run(*spans())
        assert heights == [compiled_rows(sum(ROWS)) if pads else sum(ROWS)]
        longer = [
            Span(each.seq_id, len(each.tokens), (5,), each.block_tables, draws=each.draws)
            for each in spans()
        ]
        seen.append((executor, first, Driver(executor).run(*longer)))
    (plain, *results), (padded, *others) = seen
    assert compiled_rows(sum(ROWS)) > sum(ROWS)
    for wanted, found in zip(results, others, strict=True):
        assert [each.token for each in found.draws] == [each.token for each in wanted.draws]
        for one, other in zip(wanted.scores, found.scores, strict=True):
            assert other.total == pytest.approx(one.total, rel=TOLERANCE)
    for ours, theirs in zip(padded._storage.layers, plain._storage.layers, strict=True):
        for name in ("keys", "values"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
            assert not getattr(ours, name)[:3].any(), "no block of nobody is written"


class Beside(Driver):
    def neighbours(self):
        return [Span(1, 0, (5, 6, 7, 8), ((250, 251),))]


@pytest.mark.parametrize("graph_bytes", [0, 1 << 24])
@pytest.mark.parametrize("kind", [Driver, Beside])
def test_what_is_recorded_in_a_padded_pass_gives_the_same_gradients(kind, graph_bytes):
    rng = random.Random(1)
    sequences = [
        TrainingSequence(
            tuple(rng.randrange(3, tiny_models.VOCAB) for _ in range(length)), 5, Role.TARGET, -20.0
        )
        for length in (41, 48)
    ]
    gradients = []
    for pads in (False, True):
        heights: list[int] = []
        executor = executor_of(pads, heights, graph_bytes)
        open_trainer(executor)
        driver = kind(executor)
        number, scores = driver.record("t", 0, sequences)
        rows = 87 if kind is Driver else 91
        by_hand = kind is Driver and graph_bytes  # such layers take the rows as they are
        assert rows < compiled_rows(rows)
        assert max(heights) == (compiled_rows(rows) if pads and not by_hand else rows)
        driver.backward(number, COEFFICIENTS)
        gradients.append((our_gradients(executor), scores))
    (wanted, wanted_scores), (found, found_scores) = gradients
    assert found_scores == pytest.approx(wanted_scores, rel=TOLERANCE)
    assert worst_error(found, wanted) < TOLERANCE
