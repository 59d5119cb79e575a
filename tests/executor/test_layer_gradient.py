"""Layers differentiated by hand against the same layers under autograd, and in both arithmetics."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.core.training import Role
from tandem.model import kernels, layer_gradient
from tandem.model.arithmetic import TorchArithmetic
from training_harness import (
    Driver,
    gentle,
    make_executor,
    open_trainer,
    our_gradients,
    random_sequences,
    wide,
    worst_error,
)

pytestmark = pytest.mark.skipif(not kernels.status().available, reason="no kernels")
KINDS = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.fixture
def made(monkeypatch):
    """The arithmetic of every layer that was differentiated by hand."""
    found = []
    make = layer_gradient.LayerGradient.__init__

    def noted(self, *args):
        make(self, *args)
        found.append(type(self._by).__name__)

    monkeypatch.setattr(layer_gradient.LayerGradient, "__init__", noted)
    return found


def gradients(executor, targets=(), count=3):
    open_trainer(executor, targets=targets)
    driver = Driver(executor)
    sequences = random_sequences(random.Random(1), count, (Role.TARGET,))
    number, _ = driver.record("t", 0, sequences)
    driver.backward(number, tuple(1.0 - 0.3 * place for place in range(count)))
    return our_gradients(executor)


def by_autograd(executor, monkeypatch, targets=()):
    with monkeypatch.context() as patch:
        patch.setattr(layer_gradient.LayerGradients, "of", lambda *args: None)
        return gradients(executor, targets)


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj"), ("up_proj",)], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_by_hand_equals_autograd_in_float32(name, targets, made, monkeypatch):
    executor = make_executor(gentle(name), "auto")
    found = gradients(executor, targets)
    assert set(made) == {"TorchArithmetic"}
    made.clear()
    expected = by_autograd(executor, monkeypatch, targets)
    assert made == []
    assert worst_error(found, expected) < 1e-5


def test_control_a_formula_that_is_off_by_a_hundredth_is_noticed(monkeypatch):
    executor = make_executor(gentle("qwen3"), "auto")
    expected = by_autograd(executor, monkeypatch)
    turn = TorchArithmetic.turn_back

    def off(self, gradient, qkv):
        return turn(self, gradient, qkv).mul_(1.01)

    monkeypatch.setattr(TorchArithmetic, "turn_back", off)
    assert worst_error(gradients(executor), expected) > 1e-3


@pytest.mark.skipif(not kernels.amx_linear(), reason="no AMX")
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tiles_are_as_near_to_float32_as_autograd_in_bfloat16(name, made, monkeypatch):
    expected = gradients(make_executor(wide(name, torch.float32), "auto"))
    executor = make_executor(wide(name, torch.bfloat16), "auto")
    made.clear()
    found = gradients(executor)
    assert set(made) == {"TileArithmetic"}
    plain = by_autograd(executor, monkeypatch)
    ours, autograds = worst_error(found, expected), worst_error(plain, expected)
    assert ours < 0.1
    assert ours < 1.25 * autograds
    monkeypatch.setattr(layer_gradient, "tiled", lambda *args: False)
    made.clear()
    assert worst_error(gradients(executor), expected) < 0.1
    assert set(made) == {"TorchArithmetic"}
