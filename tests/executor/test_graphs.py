"""Kept graphs: the same gradients with all, some or none of them, and never over the budget."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.core.errors import AccountingError
from tandem.core.plan import BackwardSlice, Discard, Span
from tandem.core.training import Role
from tandem.model import kernels
from tandem.training.recordings import Recordings
from training_harness import (
    Driver,
    gentle,
    make_executor,
    open_trainer,
    our_gradients,
    random_sequences,
    worst_error,
)

pytestmark = pytest.mark.skipif(not kernels.status().available, reason="no kernels")
PLENTY = 1 << 24
LAYERS = 3
COEFFICIENTS = (1.0, -0.5)


def batch(seed: int = 1):
    return random_sequences(random.Random(seed), 2, (Role.TARGET,))


def made(budget: int):
    executor = make_executor(gentle("qwen3"), "auto", graph_bytes=budget)
    open_trainer(executor)
    return executor, Driver(executor)


def kept(executor) -> int:
    executor.training.check()
    (recording,) = executor.training.recordings.of("t")
    return len(recording.graphs)


def test_kept_dropped_and_mixed_graphs_give_the_same_gradients():
    executor, driver = made(0)
    number, expected_scores = driver.record("t", 0, batch())
    assert kept(executor) == 0 == executor.memory_bytes()["graphs"]
    driver.backward(number, COEFFICIENTS)
    expected = our_gradients(executor)
    for drop in ("none", "all", "some", "inputs"):
        executor, driver = made(PLENTY)
        number, scores = driver.record("t", 0, batch())
        assert scores == pytest.approx(expected_scores, rel=1e-5)
        assert kept(executor) == LAYERS
        assert executor.memory_bytes()["graphs"] > 0
        recordings = executor.training.recordings
        (recording,) = recordings.of("t")
        if drop == "all":
            recordings.drop_graphs(recording)
        elif drop == "some":
            recordings.take_graph(recording, 1)
        elif drop == "inputs":
            recordings.drop_inputs(recording)
            assert kept(executor) == 0
        driver.run(slices=(BackwardSlice(number, LAYERS, 1, COEFFICIENTS),))
        assert kept(executor) == (1 if drop in ("none", "some") else 0)
        driver.run(slices=(BackwardSlice(number, 1, 0, COEFFICIENTS),))
        assert executor.memory_bytes()["graphs"] == 0
        assert worst_error(our_gradients(executor), expected) < 1e-5


def test_control_a_graph_of_another_layer_is_noticed():
    executor, driver = made(PLENTY)
    number, _ = driver.record("t", 0, batch())
    driver.backward(number, COEFFICIENTS)
    expected = our_gradients(executor)
    executor, driver = made(PLENTY)
    number, _ = driver.record("t", 0, batch())
    (recording,) = executor.training.recordings.of("t")
    recording.graphs[1] = recording.graphs[2]
    driver.backward(number, COEFFICIENTS)
    assert worst_error(our_gradients(executor), expected) > 1e-2


def test_the_budget_is_kept_by_itself_and_the_oldest_stay():
    executor, driver = made(PLENTY)
    driver.record("t", 0, batch())
    each = executor.memory_bytes()["graphs"] // LAYERS
    executor, driver = made(4 * each + each // 2)
    numbers = [driver.record("t", 0, batch())[0] for _ in range(2)]
    executor.training.check()
    recordings = executor.training.recordings
    assert [len(recordings.get(number).graphs) for number in numbers] == [LAYERS, 1]
    assert recordings.graph_bytes == 4 * each
    for number in numbers:
        driver.backward(number, COEFFICIENTS)
        executor.training.check()
    found = our_gradients(executor)
    executor, driver = made(0)
    for _ in range(2):
        driver.backward(driver.record("t", 0, batch())[0], COEFFICIENTS)
    assert worst_error(found, our_gradients(executor)) < 1e-5


def test_nothing_is_kept_of_chunks_or_beside_others():
    executor = make_executor(gentle("qwen3"), "auto", graph_bytes=PLENTY)
    open_trainer(executor)
    chunked = Driver(executor, random.Random(4))
    chunked.record("t", 0, batch())
    assert kept(executor) == 0

    class Beside(Driver):
        def neighbours(self):
            return [Span(1, 0, (5, 6, 7), ((250, 251),))]

    executor, _ = made(PLENTY)
    Beside(executor).record("t", 0, batch())
    assert kept(executor) == 0


def test_a_sequence_without_a_coefficient_is_left_out():
    found = []
    for budget in (0, PLENTY):
        executor, driver = made(budget)
        driver.backward(driver.record("t", 0, batch())[0], (0.0, 1.0))
        found.append(our_gradients(executor))
    assert worst_error(found[1], found[0]) < 1e-5


def test_check_finds_graphs_that_should_be_gone():
    executor, driver = made(PLENTY)
    number, _ = driver.record("t", 0, batch())
    (recording,) = executor.training.recordings.of("t")
    graph = recording.graphs[2]
    driver.run(slices=(BackwardSlice(number, LAYERS, 1, COEFFICIENTS),))
    recording.graphs[2] = graph
    with pytest.raises(AccountingError, match="graph"):
        executor.training.check()
    recording.graphs.clear()
    executor.training.recordings._graph_budget = 0
    recording.graphs[0] = graph
    with pytest.raises(AccountingError, match="graphs take"):
        executor.training.check()


@pytest.fixture(scope="module")
def pressed():
    executor = make_executor(gentle("qwen3"), "auto")
    open_trainer(executor)
    return executor


def all_then_backward(executor, budget: tuple[int, int], seed: int) -> tuple[dict, set[str]]:
    """Gradients of three micro-batches, all recorded before the first slice, with room for
    `budget` rows and bytes; and what was seen to be missing by itself when slices began."""
    rows, graph_bytes = budget
    training, rng = executor.training, random.Random(seed)
    training.recordings = Recordings(torch.zeros(LAYERS, rows, 64), graph_bytes)
    driver = Driver(executor)
    driver.run(discards=(Discard("t", ()),))
    numbers = []
    for place in range(3):
        # Some in chunks, of which no graph is kept.
        driver.rng = random.Random(seed) if rng.random() < 0.25 else None
        numbers.append(driver.record("t", 0, batch(seed + place))[0])
        training.check()
    driver.rng = rng
    missing = set()
    for number in rng.sample(numbers, len(numbers)):
        recording = training.recordings.get(number)
        missing |= {"inputs"} if recording.first_row is None else set()
        missing |= {"graphs"} if len(recording.graphs) < LAYERS else set()
        driver.backward(number, COEFFICIENTS)
        training.check()
    assert executor.memory_bytes()["graphs"] == 0
    return our_gradients(executor), missing


def rows_of(seed: int) -> list[int]:
    return [sum(len(s.tokens) - 1 for s in batch(seed + place)) for place in range(3)]


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**6), rows=st.floats(0, 1), graphs=st.floats(0, 1))
def test_any_budget_of_rows_and_bytes_gives_the_same_gradients(pressed, seed, rows, graphs):
    sizes = rows_of(seed)
    expected, _ = all_then_backward(pressed, (sum(sizes), 0), seed)
    room = max(sizes) + int(rows * (sum(sizes) - max(sizes)))
    found, _ = all_then_backward(pressed, (room, int(graphs * 2e6)), seed)
    assert worst_error(found, expected) < 1e-5


def test_little_room_drops_inputs_and_graphs_without_being_told(pressed):
    seen = [all_then_backward(pressed, (max(rows_of(s)), 200_000), s)[1] for s in range(4)]
    assert all(missing == {"inputs", "graphs"} for missing in seen)
