"""Work that gives way: what is done stays, what was not ended never was and can be done again."""

from __future__ import annotations

import random

import pytest

import tiny_models
from tandem.core.plan import DEVICE_LANE, BackwardSlice, Draw, LanePlan, Span, Update
from tandem.core.sampling import SamplingParams
from tandem.core.training import Role
from training_harness import (
    Driver,
    gentle,
    make_executor,
    open_trainer,
    our_gradients,
    random_sequences,
    worst_error,
)

LAYERS = 3
COEFFICIENTS = (1.0, -0.5)


def after(asked: int):
    """Urgent from the `asked`-th question on."""
    count = 0

    def urgent() -> bool:
        nonlocal count
        count += 1
        return count >= asked

    return urgent


def submitted(executor, plan, urgent):
    executor.submit(plan, urgent)
    (result,) = executor.poll()
    return result


def batch():
    return random_sequences(random.Random(1), 2, (Role.TARGET,))


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_a_pass_that_was_lost_is_done_again_with_the_same_gradients(kernels):
    """Stopped before each layer and before the head, with graphs, inner layers or none of them."""
    found = []
    for haste in (0.0, 0.4):
        executor = make_executor(gentle("qwen3"), kernels, graph_bytes=1 << 24)
        open_trainer(executor)
        driver = Driver(executor, random.Random(7), haste=haste)
        driver.backward(driver.record("t", 0, batch())[0], COEFFICIENTS)
        assert bool(driver.stops) == bool(haste)
        found.append(our_gradients(executor))
    assert worst_error(found[1], found[0]) < 1e-5


def test_layers_that_are_done_stay_done():
    executor = make_executor(gentle("llama"))
    open_trainer(executor)
    number, _ = Driver(executor).record("t", 0, batch())
    for at in (LAYERS, LAYERS - 1):
        part = BackwardSlice(number, at, 0, COEFFICIENTS)
        plan = LanePlan(0, DEVICE_LANE, (), slices=(part,), preemptible=True)
        (done,) = submitted(executor, plan, after(2)).slices
        assert (done.hi, done.lo, done.problem) == (at, at - 1, None)
    last = (BackwardSlice(number, 1, 0, COEFFICIENTS),)
    plan = LanePlan(0, DEVICE_LANE, (), slices=last, updates=(Update("t", 0),), preemptible=True)
    nothing = submitted(executor, plan, lambda: True)
    assert nothing.slices == () == nothing.updates and not nothing.stopped


def test_only_a_plan_that_says_so_gives_way():
    executor = make_executor(tiny_models.make_model("llama"))
    draw = Draw(1, 0, 0, SamplingParams(temperature=0.0))
    span = Span(1, 0, (5, 6, 7), ((0, 1),), draws=(draw,))
    assert submitted(executor, LanePlan(0, DEVICE_LANE, (span,)), lambda: True).draws
    score = Span(2, 0, (5, 6, 7), ((2, 3),), score_targets=(6, 7), score_top=None)
    whole = submitted(executor, LanePlan(0, DEVICE_LANE, (score,), preemptible=True), after(99))
    for asked in range(1, LAYERS + 2):  # before each layer, and before the head
        plan = LanePlan(0, DEVICE_LANE, (score,), preemptible=True)
        lost = submitted(executor, plan, after(asked))
        assert lost.stopped and lost.scores == () == lost.failed
    again = submitted(executor, LanePlan(0, DEVICE_LANE, (score,)), lambda: True)
    assert again.scores == whole.scores and not again.stopped
