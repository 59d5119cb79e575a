"""What the kernels keep of recorded rows in mixed passes is what a slice would compute again."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.core.plan import Span
from tandem.core.training import Role
from tandem.executor import inner
from tandem.model import kernels
from tandem.model.layer_gradient import Inner
from training_harness import (
    Driver,
    make_executor,
    open_trainer,
    our_gradients,
    random_sequences,
    wide,
    worst_error,
)

pytestmark = pytest.mark.skipif(not kernels.amx_linear(), reason="no AMX")
PLENTY = 1 << 24
LAYERS = 3
COEFFICIENTS = (1.0, -0.5, 0.7)


class Beside(Driver):
    """Records in random pieces, with a request in every pass."""

    def neighbours(self):
        return [Span(1, 0, (5, 6, 7), ((250, 251),))]


def sequences(seed: int = 1):
    rng = random.Random(seed)
    return [each for _ in range(3) for each in random_sequences(rng, 1, (Role.TARGET,))]


def made(name: str, budget: int = PLENTY, dtype: torch.dtype = torch.bfloat16):
    executor = make_executor(wide(name, dtype), "auto", graph_bytes=budget)
    open_trainer(executor)
    return executor, Beside(executor, random.Random(3))


def recording_of(executor):
    executor.training.check()
    (recording,) = executor.training.recordings.of("t")
    return recording


def rows_of(tiles, rows: int):
    """[rows, width] of tiles [blocks, steps, 32, 32]."""
    return tiles.transpose(1, 2).flatten(0, 1).flatten(1)[:rows]


def distance(found, expected) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_kept_rows_are_those_that_a_slice_would_compute(name):
    executor, driver = made(name)
    driver.record("t", 0, sequences())
    recording = recording_of(executor)
    rows = executor.training.recordings.rows(recording)
    replay = executor.training._replay("t", recording.tokens, recording.lengths)
    assert sorted(recording.graphs) == list(range(LAYERS))
    for layer, found in recording.graphs.items():
        assert isinstance(found, Inner)
        hidden = replay.embedded if layer == 0 else rows[layer - 1]
        _, expected = replay.forward_by_hand(layer, hidden)
        assert distance(found.middle, expected.middle) < 0.01
        count = recording.num_rows
        pair = rows_of(found.gate_up, count), rows_of(expected.gate_up, count)
        assert distance(*pair) < 0.01
        assert found.gate_up.isfinite().all(), "rows past the end are summed too"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradients_are_as_good_as_without(name):
    found = {}
    for key, budget, dtype in (
        ("exact", 0, torch.float32),
        ("without", 0, torch.bfloat16),
        ("with", PLENTY, torch.bfloat16),
    ):
        executor, driver = made(name, budget, dtype)
        number, _ = driver.record("t", 0, sequences())
        assert bool(recording_of(executor).graphs) == (key == "with")
        driver.backward(number, COEFFICIENTS)
        found[key] = our_gradients(executor)
    ours = worst_error(found["with"], found["exact"])
    assert ours < 0.1
    assert ours < 1.25 * worst_error(found["without"], found["exact"])


def test_control_what_another_layer_kept_is_noticed():
    executor, driver = made("llama")
    number, _ = driver.record("t", 0, sequences())
    driver.backward(number, COEFFICIENTS)
    expected = our_gradients(executor)
    executor, driver = made("llama")
    number, _ = driver.record("t", 0, sequences())
    graphs = recording_of(executor).graphs
    graphs[1] = graphs[2]
    driver.backward(number, COEFFICIENTS)
    assert worst_error(our_gradients(executor), expected) > 0.1


def test_the_budget_holds_and_the_uppermost_layers_come_first():
    executor, driver = made("llama")
    driver.record("t", 0, sequences())
    each = executor.memory_bytes()["graphs"] // LAYERS
    executor, driver = made("llama", 2 * each + each // 2)
    number, _ = driver.record("t", 0, sequences())
    assert sorted(recording_of(executor).graphs) == [1, 2]
    other, _ = driver.record("t", 0, sequences())
    executor.training.check()
    assert not executor.training.recordings.get(other).graphs
    for each_number in (number, other):
        driver.backward(each_number, COEFFICIENTS)
    assert executor.memory_bytes()["graphs"] == 0


def test_a_micro_batch_is_kept_from_its_first_pass_on_or_not_at_all():
    executor, driver = made("llama")
    recordings = executor.training.recordings
    budget, recordings._graph_budget = recordings._graph_budget, 0
    run = driver.run

    def with_room_later(*spans, **parts):
        result = run(*spans, **parts)
        recordings._graph_budget = budget
        return result

    driver.run = with_room_later
    driver.record("t", 0, sequences())
    assert not recording_of(executor).graphs


def test_a_layer_that_says_nothing_in_one_pass_is_kept_no_longer(monkeypatch):
    executor, driver = made("llama")
    exports, passes = inner.InnerKeeper.exports, []

    def silent_once(self, layer, middle):
        if layer == 1:
            passes.append(layer)
            if len(passes) == 2:
                return exports(self, 0, middle)
        return exports(self, layer, middle)

    monkeypatch.setattr(inner.InnerKeeper, "exports", silent_once)
    driver.record("t", 0, sequences())
    assert len(passes) > 2
    assert sorted(recording_of(executor).graphs) == [0, 2]


def test_nothing_is_kept_where_the_kernels_compute_by_parts():
    executor, driver = made("llama", dtype=torch.float32)
    driver.record("t", 0, sequences())
    assert not recording_of(executor).graphs
