"""What fails on the device while a trainer learns: it says so, and nothing else is lost."""

from __future__ import annotations

import random

import pytest
import torch

import tiny_models
from tandem.core.errors import AdapterError, NoMemory
from tandem.core.plan import (
    DEVICE_LANE,
    NO_MEMORY,
    BackwardSlice,
    Discard,
    Draw,
    LanePlan,
    Span,
    Update,
)
from tandem.core.sampling import SamplingParams
from tandem.core.training import Role
from tandem.executor import training
from tandem.executor.forward import RunningBatch
from tandem.model.lora import LoraLayers
from tandem.training.trainer import Trainer
from training_harness import Driver, make_executor, open_trainer, our_gradients, random_sequences


@pytest.fixture
def executor():
    return make_executor(tiny_models.make_model("llama"))


def test_what_is_not_finite_changes_nothing(executor):
    driver = Driver(executor)
    open_trainer(executor)
    before = executor.snapshot_trainer("t").parameters
    number, _ = driver.record("t", 0, random_sequences(random.Random(3), 2, (Role.TARGET,)))
    driver.backward(number, (float("nan"), 1.0))
    result = driver.update("t", 0)
    assert not result.applied and result.problem and result.revision == 0
    assert torch.equal(executor.snapshot_trainer("t").parameters, before)


def test_a_failing_slice_says_so_and_can_be_done_again(executor, monkeypatch):
    driver = Driver(executor)
    open_trainer(executor)
    batch = random_sequences(random.Random(4), 2, (Role.TARGET,))
    number, _ = driver.record("t", 0, batch)
    layer = training.LoraReplay.layer

    def failing(self, index, hidden):
        if index == 1:
            raise RuntimeError("the kernel failed")
        return layer(self, index, hidden)

    with monkeypatch.context() as patch:
        patch.setattr(training.LoraReplay, "layer", failing)
        part = BackwardSlice(number, 3, 0, (1.0, 1.0))
        executor.submit(LanePlan(0, DEVICE_LANE, (), slices=(part,)))
        (result,) = executor.poll()
        assert "the kernel failed" in result.slices[0].problem
    driver.backward(number, (1.0, 1.0))
    found = our_gradients(executor)
    driver.run(discards=(Discard("t", ()),))
    driver.backward(driver.record("t", 0, batch)[0], (1.0, 1.0))
    for key, value in our_gradients(executor).items():
        assert torch.equal(found[key], value)


def test_an_update_survives_a_pass_whose_results_cannot_be_read(executor, monkeypatch):
    """Its spans fail, alone; what was trained beside them counts, and training goes on."""
    driver = Driver(executor)
    open_trainer(executor)
    batch = random_sequences(random.Random(4), 2, (Role.TARGET,))
    number, _ = driver.record("t", 0, batch)
    span = Span(9, 0, (5, 6), ((200,),), draws=(Draw(9, 0, 0, SamplingParams(temperature=0.0)),))
    part = BackwardSlice(number, executor.info.num_layers, 0, (1.0, 1.0))
    plan = LanePlan(1, DEVICE_LANE, (span,), slices=(part,), updates=(Update("t", 0),))

    def failing(self):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(RunningBatch, "_find", failing)
        executor.submit(plan)
        (result,) = executor.poll()
    assert dict(result.failed) == {9: NO_MEMORY}
    assert result.slices[0].problem is None
    assert result.updates[0].applied and result.updates[0].revision == 1
    driver.backward(driver.record("t", 1, batch)[0], (1.0, 1.0))
    assert driver.update("t", 1).revision == 2


def test_an_update_whose_parameters_find_no_memory_says_its_revision(executor, monkeypatch):
    driver = Driver(executor)
    open_trainer(executor)
    batch = random_sequences(random.Random(4), 2, (Role.TARGET,))
    driver.backward(driver.record("t", 0, batch)[0], (1.0, 1.0))

    def failing(self, key, adapter):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(LoraLayers, "add", failing)
        result = driver.update("t", 0)
    assert (result.applied, result.revision, result.problem) == (False, 1, NO_MEMORY)


def test_a_trainer_whose_copies_find_no_memory_is_not_open(executor, monkeypatch):
    """Neither when it is opened nor when it is written; the next try has the memory."""

    def failing(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(LoraLayers, "add", failing)
        with pytest.raises(NoMemory, match="trainer t now"):
            open_trainer(executor)
    executor.close_trainer("t")
    open_trainer(executor)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "snapshot", failing)
        with pytest.raises(NoMemory, match="trainer t now"):
            executor.snapshot_trainer("t")
    executor.snapshot_trainer("t")


def test_unknown_and_stale_work_is_refused_by_name(executor):
    driver = Driver(executor)
    open_trainer(executor)
    plans = LanePlan(
        0,
        DEVICE_LANE,
        (),
        slices=(BackwardSlice(7, 3, 0, (1.0,)),),
        updates=(Update("t", 4), Update("nobody", 0)),
    )
    executor.submit(plans)
    (result,) = executor.poll()
    assert "not open" in result.slices[0].problem
    assert [update.applied for update in result.updates] == [False, False]
    with pytest.raises(AdapterError):
        executor.snapshot_trainer("nobody")
    assert driver.executor.info.recording_tokens == 512
