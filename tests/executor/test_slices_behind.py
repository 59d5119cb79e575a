"""Slices behind a pass: their order, and times on a device that computes after the host."""

from __future__ import annotations

import math
import random
import time
from typing import ClassVar

import pytest
import torch

import tiny_models
from devices import CUDA
from tandem.core.plan import BackwardSlice, Draw, Span, Update
from tandem.core.sampling import SamplingParams
from tandem.core.training import LossKind, LossSpec, Role
from tandem.executor import executor as forward_half
from tandem.executor import training
from tandem.executor.capture import CudaCapture
from tandem.executor.forward import RunningBatch
from training_harness import Driver, make_executor, open_trainer, random_sequences, wide


@pytest.fixture
def executor():
    return make_executor(tiny_models.make_model("llama"))


class Behind:
    """A mark that the device reaches after the host: everything takes it 30 ms longer."""

    given = 0
    waited: ClassVar[list[int]] = []

    def __init__(self, device):
        self.number = Behind.given
        Behind.given += 1
        self.at = time.perf_counter() + 0.03 * self.number

    def wait(self):
        Behind.waited.append(self.number)

    def seconds_until(self, later):
        later.wait()
        return later.at - self.at


@pytest.fixture
def behind(monkeypatch):
    """Marks of a device that computes asynchronously."""
    Behind.given = 0
    Behind.waited.clear()
    monkeypatch.setattr(forward_half, "mark", Behind)
    monkeypatch.setattr(training, "mark", Behind)
    monkeypatch.setattr(training, "wait_for", lambda device: time.sleep(0.03))
    return Behind


def recorded(executor, driver):
    """A micro-batch of one sequence, and a slice for each of its layers."""
    (sequence,) = random_sequences(random.Random(6), 1, (Role.TARGET,))
    number, _ = driver.record("t", 0, [sequence])
    layers = range(executor.info.num_layers, 0, -1)
    return tuple([BackwardSlice(number, hi, hi - 1, (1.0,)) for hi in layers])


SPAN = Span(9, 0, (5, 6), ((200,),), draws=(Draw(9, 0, 0, SamplingParams(temperature=0.0)),))


def test_times_count_what_a_device_still_computes(executor, behind):
    driver = Driver(executor)
    open_trainer(executor)
    parts = recorded(executor, driver)
    result = driver.run(SPAN, slices=parts, updates=(Update("t", 0),))
    assert 0.03 <= result.forward_s < result.elapsed_s and not result.timed
    times = [*(piece.elapsed_s for piece in result.slices), result.updates[0].elapsed_s]
    assert len(times) == len(parts) + 1 and all(seconds >= 0.03 for seconds in times)


def test_tokens_do_not_wait_for_slices_and_their_times_come_with_the_next_plan(executor, behind):
    driver = Driver(executor)
    open_trainer(executor)
    executor._trails = True
    parts = recorded(executor, driver)
    behind.waited.clear()
    first = driver.run(SPAN, slices=parts[:2])
    assert first.draws and [each.hi for each in first.slices] == [3, 2]
    assert all(math.isnan(each.elapsed_s) for each in first.slices)
    assert first.elapsed_s == first.forward_s > 0.0 == first.backward_s
    assert max(behind.waited) < behind.given - 5, "the pass's mark, not those of slices after it"
    second = driver.run(SPAN, slices=parts[2:])
    assert [(each.hi, each.lo) for each in second.timed] == [(3, 2), (2, 1)]
    assert all(each.elapsed_s >= 0.03 for each in second.timed)
    assert second.backward_s == pytest.approx(sum(each.elapsed_s for each in second.timed))
    learned = driver.run(slices=(), updates=(Update("t", 0),))
    assert [each.hi for each in learned.timed] == [1]
    assert learned.updates[0].applied


def test_what_a_pass_still_computes_comes_before_slices(executor, monkeypatch):
    """Log-probabilities would wait for the slices behind the pass."""
    order = []
    outcomes, run_slice = RunningBatch.outcomes, training.TrainingState.run_slice
    monkeypatch.setattr(
        RunningBatch, "outcomes", lambda batch: order.append("outcomes") or outcomes(batch)
    )
    monkeypatch.setattr(
        training.TrainingState,
        "run_slice",
        lambda *given: order.append("slice") or run_slice(*given),
    )
    monkeypatch.setattr(executor, "_trails", True)
    driver = Driver(executor)
    open_trainer(executor)
    for logprobs, first in ((None, ["outcomes", "slice"]), (2, ["outcomes", "outcomes", "slice"])):
        sampling = SamplingParams(temperature=0.0, logprobs=logprobs)
        span = Span(9, 0, (5, 6), ((200,),), draws=(Draw(9, 0, 0, sampling),))
        parts = recorded(executor, driver)
        order.clear()
        result = driver.run(span, slices=parts)
        assert (result.draws[0].logprob is not None) == (logprobs is not None)
        assert order[: len(first)] == first  # on a CPU, a pass is read once it is done


class Beside(Driver):
    """A request decodes in every pass, and beside every slice."""

    def __init__(self, executor, rng):
        super().__init__(executor, rng, pool=list(range(200)))
        self.tokens, self.computed, self.trailed, self.timed = [5, 6], 0, 0, []

    def neighbours(self):
        draw = Draw(9, 0, len(self.tokens), SamplingParams(temperature=0.0))
        new = tuple(self.tokens[self.computed :])
        return [Span(9, self.computed, new, (tuple(range(200, 256)),), draws=(draw,))]

    def run(self, *spans, **parts):
        result = super().run(*spans, **parts)
        for draw in result.draws:
            self.computed = len(self.tokens)
            self.tokens.append(draw.token)
        self.trailed += sum(math.isnan(each.elapsed_s) for each in result.slices)
        self.timed += [each.elapsed_s for each in result.timed]
        return result


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_slices_that_trail_passes_change_neither_tokens_nor_what_is_learned(device):
    found = []
    for trails in (False, True):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        executor = make_executor(wide("llama", dtype).to(device), "auto")
        if device == "cuda":
            executor.capture_passes(CudaCapture(torch.device("cuda")), 0.0)
        executor._trails = trails
        open_trainer(executor, learning_rate=1e-2)
        driver = Beside(executor, random.Random(3))
        pairs = random_sequences(random.Random(1), 4, (Role.CHOSEN, Role.REJECTED))
        losses, norms = [], []
        for revision in range(3):
            loss = LossSpec(LossKind.DPO)
            losses.append(driver.step("t", revision, loss, [pairs[:2], pairs[2:]]))
            updated = driver.update("t", revision)
            assert updated.applied
            norms.append(updated.grad_norm)
        assert (driver.trailed > 0) == trails
        assert len(driver.timed) == driver.trailed and all(each > 0.0 for each in driver.timed)
        found.append((driver.tokens, losses, norms))
    (tokens, losses, norms), (trailing_tokens, trailing_losses, trailing_norms) = found
    assert len(tokens) > 20 and trailing_tokens == tokens
    assert trailing_losses == pytest.approx(losses, rel=1e-3)
    assert trailing_norms == pytest.approx(norms, rel=1e-3)
