"""Gradients of sliced, chunked, paused and fused steps against plain autograd through PEFT."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny_models
from devices import DEVICES
from tandem.core.plan import Span, working_key
from tandem.core.training import LossKind, LossSpec, Role
from tandem.model.attention import dense
from training_harness import (
    Driver,
    gentle,
    make_executor,
    open_trainer,
    our_gradients,
    peft_gradients,
    peft_model,
    peft_step,
    random_sequences,
    worst_error,
)

ROLES = {
    LossKind.SFT: (Role.TARGET,),
    LossKind.DPO: (Role.CHOSEN, Role.REJECTED),
    LossKind.KTO: (Role.DESIRABLE, Role.UNDESIRABLE, Role.MISMATCHED),
}
TOLERANCE = 1e-5


@dataclass
class Busy(Driver):
    """Decodes of the base and of another trainer run beside; recorded inputs get dropped."""

    pressure: float = 0.0

    def neighbours(self) -> list[Span]:
        assert self.rng is not None
        tokens = tuple(self.rng.randrange(3, 99) for _ in range(self.rng.choice([1, 1, 5])))
        adapter = self.rng.choice([None, working_key("other")])
        return [Span(1, 0, tokens, ((250, 251),), adapter=adapter)]

    def between(self) -> None:
        assert self.rng is not None
        recordings = self.executor.training.recordings
        for recording in recordings.of("t"):
            if self.rng.random() < self.pressure:
                recordings.drop_inputs(recording)
        self.executor.training.check()


def compare(executor, base, kind, rng, pressure=0.0, haste=0.0):
    """The worst tensor's relative error over one step of two micro-batches."""
    open_trainer(executor)
    open_trainer(executor, "other", rank=2, seed=5)
    sizes = (3, 6) if kind is LossKind.KTO else (2, 4)
    micro_batches = [random_sequences(rng, count, ROLES[kind]) for count in sizes]
    driver = Busy(executor, rng, pressure=pressure, haste=haste)
    loss = driver.step("t", 0, LossSpec(kind), micro_batches)
    assert driver.stops > 0 or haste < 0.4
    adapted = peft_model(base, executor)
    expected = peft_step(adapted, LossSpec(kind), micro_batches)
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert executor.training.recordings.of("t") == []
    return worst_error(our_gradients(executor), peft_gradients(adapted))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "mode"), tiny_models.with_kernels(sorted(tiny_models.ARCHITECTURES))
)
def test_equals_plain_autograd(name, mode, device):
    executor = make_executor(gentle(name).to(device), mode)
    for kind in sorted(ROLES):
        assert compare(executor, gentle(name), kind, random.Random(name), 0.3) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_float64_leaves_only_the_rounding_of_the_models_own_float32_parts(name):
    executor = make_executor(gentle(name, torch.float64))
    error = compare(executor, gentle(name, torch.float64), LossKind.DPO, random.Random(3))
    assert error < 2e-6


@pytest.fixture(scope="module")
def shared():
    return make_executor(gentle("gemma2"), "auto")


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    pressure=st.sampled_from([0.0, 0.5, 1.0]),
    haste=st.sampled_from([0.0, 0.1, 0.4]),
)
def test_any_slices_chunks_neighbours_pressure_and_haste(shared, seed, pressure, haste):
    rng = random.Random(seed)
    kind = rng.choice(sorted(ROLES))
    assert compare(shared, gentle("gemma2"), kind, rng, pressure, haste) < TOLERANCE


def test_control_a_prompt_without_gradient_is_noticed(monkeypatch):
    executor = make_executor(gentle("llama"))
    whole = dense.DenseContext.attend

    def detached(self, layer, query, key, value, params):
        key = torch.cat([key[:2].detach(), key[2:]])
        value = torch.cat([value[:2].detach(), value[2:]])
        return whole(self, layer, query, key, value, params)

    monkeypatch.setattr(dense.DenseContext, "attend", detached)
    error = compare(executor, gentle("llama"), LossKind.SFT, random.Random(4))
    assert error > 100 * TOLERANCE


def test_control_a_window_that_is_not_kept_is_noticed(monkeypatch):
    executor = make_executor(gentle("mistral"))
    bias = dense.DenseContext._bias
    monkeypatch.setattr(
        dense.DenseContext, "_bias", lambda self, n, window, like: bias(self, n, window + 1, like)
    )
    error = compare(executor, gentle("mistral"), LossKind.SFT, random.Random(5))
    assert error > 100 * TOLERANCE
