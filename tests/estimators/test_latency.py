"""The time model finds the device's rates, forgives a hiccup, follows a change, and owns up."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.plan import BackwardSlice, LanePlan, SliceResult, Span, StepResult, UpdateResult
from tandem.estimators.latency import LatencyModel, LinearModel


def passes(rng: random.Random, count: int) -> list[tuple[int, int, int, int]]:
    """Tokens, draws, scored, context of passes as they occur: decodes, prompts, training."""
    found = []
    for _ in range(count):
        decodes, prompt, training = rng.randint(0, 16), rng.choice([0, 100]), rng.choice([0, 60])
        scored = training // 2
        tokens = decodes + prompt + training or 1
        found.append((tokens, decodes + (prompt > 0), scored, tokens + 200 * decodes))
    return found


def device_s(tokens: int, draws: int, scored: int, context: int) -> float:
    return 0.05 + 0.0008 * tokens + 0.001 * draws + 0.002 * scored + 0.000004 * context


def test_it_finds_the_rates_and_reports_its_error():
    rng = random.Random(0)
    model = LatencyModel(weight_bytes=10**9, num_parameters=5 * 10**8, num_layers=24)
    for work in passes(rng, 200):
        model.observe_forward(*work, device_s(*work) * rng.uniform(0.97, 1.03))
    for work in passes(rng, 50):
        assert model.forward_s(*work) == pytest.approx(device_s(*work), rel=0.05)
    assert model.forward.error < 0.05 and abs(model.forward.bias) < 0.05
    assert model.forward.samples == 200
    assert model.token_s == pytest.approx(0.0028, rel=0.2)


def test_first_predictions_are_of_the_right_size():
    """0.5B parameters in bf16: a decode streams a gigabyte; a row needs a gigaflop."""
    model = LatencyModel(weight_bytes=10**9, num_parameters=5 * 10**8, num_layers=24)
    assert 0.02 < model.forward_s(1, 1, 0, 100) < 0.2
    assert 0.1 < model.forward_s(256, 1, 0, 256) < 2.0
    assert model.slice_s(256, 24) > model.forward_s(256, 0, 0, 256)
    assert model.forward_s(0, 0, 0, 0) == 0.0 and model.slice_s(100, 0) == 0.0


def test_one_stalled_iteration_does_not_ruin_the_fit():
    model = LinearModel((0.01, 0.001))
    for tokens in [*range(1, 60)]:
        model.observe((1.0, tokens), 0.02 + 0.002 * tokens)
    before = model.predict((1.0, 30))
    model.observe((1.0, 30), 5.0)
    assert model.predict((1.0, 30)) < 1.5 * before
    for tokens in range(1, 20):
        model.observe((1.0, tokens), 0.02 + 0.002 * tokens)
    assert model.predict((1.0, 30)) == pytest.approx(before, rel=0.1)


def test_it_follows_a_device_that_has_become_slower():
    model = LinearModel((0.01, 0.001))
    for factor in (1.0, 10.0):
        for tokens in range(1, 40):
            model.observe((1.0, tokens), factor * (0.02 + 0.002 * tokens))
    assert model.predict((1.0, 20)) == pytest.approx(0.6, rel=0.1)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 1000), st.floats(1e-6, 1000)), max_size=60)
)
def test_more_work_is_never_predicted_to_be_cheaper(samples):
    model = LinearModel((0.01, 0.001, 0.0001))
    for first, second, seconds in samples:
        model.observe((1.0, first, second), seconds)
        assert all(value > 0.0 and math.isfinite(value) for value in model.coefficients)


def test_layers_within_a_time_take_that_time():
    model = LatencyModel(weight_bytes=0, num_parameters=10**9, num_layers=10)
    for layers in (1, 3, 9):
        seconds = model.slice_s(100, layers)
        assert model.layers_within(100, seconds) == layers
        assert model.layers_within(100, seconds * 0.999) == layers - 1
    assert model.layers_within(100, 0.0) == 0


def test_it_learns_from_plans_and_results():
    model = LatencyModel(weight_bytes=0, num_parameters=10**6, num_layers=4)
    span = Span(0, 0, (1, 2, 3), ((0,),))
    for _ in range(20):
        result = StepResult(
            0, "device", 0.5, forward_s=0.1, slices=(SliceResult(7, 4, 2, 0.3),),
            updates=(UpdateResult("t", 1, True, 1.0, 1.0, 0.1),),
        )  # fmt: skip
        model.observe(LanePlan(0, "device", (span,)), result, lambda number: 50)
    assert model.forward_s(3, 0, 0, 3) == pytest.approx(0.1, rel=0.02)
    assert model.slice_s(50, 2) == pytest.approx(0.3, rel=0.02)
    assert model.update_s() == pytest.approx(0.1, rel=0.02)


def test_a_failed_slice_or_an_unknown_one_teaches_nothing():
    model = LatencyModel(weight_bytes=0, num_parameters=10**6, num_layers=4)
    result = StepResult(0, "device", 0.5, slices=(SliceResult(7, 4, 2, 0.3, "broken"),))
    model.observe(LanePlan(0, "device", ()), result, lambda number: 50)
    assert model.backward.samples == 0 and math.isnan(model.backward.error)


def test_it_learns_what_recording_costs():
    """A pass that records costs 50 ms before its first recorded row, and 1 ms for each."""
    rng = random.Random(0)
    model = LatencyModel(weight_bytes=10**9, num_parameters=5 * 10**8, num_layers=24)

    def device_s(rows: int, recorded: int) -> float:
        fixed_s = 0.05 if recorded else 0.0
        return 0.05 + 0.001 * (rows + recorded) + fixed_s

    for _ in range(400):
        rows = rng.randint(1, 512)
        recorded = rng.choice((0, rng.randint(1, rows)))
        model.observe_forward(rows, 1, 0, rows, device_s(rows, recorded), recorded)
    for rows, recorded in ((8, 0), (72, 64), (500, 0), (500, 480)):
        predicted = model.forward_s(rows, 1, 0, rows, recorded)
        assert predicted == pytest.approx(device_s(rows, recorded), rel=0.05)


def test_decodes_like_the_last_ones_are_learned_from_now_and_then():
    model = LatencyModel(weight_bytes=10**9, num_parameters=10**8, num_layers=4)

    def iteration(decodes: int, slices: tuple[BackwardSlice, ...] = ()) -> int:
        spans = tuple(Span(place, 9, (5,), ((0,),), None, ()) for place in range(decodes))
        before = model.forward.samples
        result = StepResult(0, "device", 0.05, forward_s=0.05)
        model.observe(LanePlan(0, "device", spans, slices=slices), result, lambda number: 0)
        return model.forward.samples - before

    assert [iteration(8) for _ in range(9)] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert [iteration(decodes) for decodes in (8, 7, 8, 8)] == [0, 1, 1, 0]
    assert iteration(8, (BackwardSlice(0, 4, 3, ()),)) == 1
