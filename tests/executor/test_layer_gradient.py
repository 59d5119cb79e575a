"""Layers differentiated by hand against the same layers under autograd, and in both arithmetics."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from devices import INTERPRETED
from tandem.core.plan import BackwardSlice
from tandem.core.training import LossKind, LossSpec, Role
from tandem.executor import training
from tandem.model import kernels, layer_gradient
from tandem.model.attention.gradient import DenseGradient
from tandem.model.gpu.launch import watched
from tandem.model.gradient_rows import CppGradientRows, GradientKernels
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


def by_autograd(executor, monkeypatch, targets=(), count=3):
    with monkeypatch.context() as patch:
        patch.setattr(layer_gradient.LayerGradients, "of", lambda *args: None)
        return gradients(executor, targets, count)


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
    turn = CppGradientRows.turn_heads_gradient

    def off(self, *args):
        return turn(self, *args).mul_(1.01)

    monkeypatch.setattr(CppGradientRows, "turn_heads_gradient", off)
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


@pytest.fixture
def on_triton(kernel, monkeypatch):
    """Layers are differentiated by the Triton kernels, with autograd's attention."""
    from tandem.model.gpu.gradients import TritonGradientRows

    by = GradientKernels(TritonGradientRows(), DenseGradient)
    monkeypatch.setattr(training, "gradient_kernels", lambda *args: by)


# On a GPU, `test_on_a_gpu` shows the same for the model as it is loaded there.
interpreted = pytest.mark.parametrize(
    "kernel", [pytest.param("triton", marks=[] if INTERPRETED else pytest.mark.skip)]
)


@interpreted
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj", "up_proj")], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_triton_equals_autograd_in_float32(name, targets, on_triton, made, monkeypatch):
    executor = make_executor(gentle(name), "auto")
    found = gradients(executor, targets, 2)
    assert set(made) == {"TorchArithmetic"}
    assert worst_error(found, by_autograd(executor, monkeypatch, targets, 2)) < 1e-5


class Launches(TorchDispatchMode):
    """Counts what a device would be given: calls that compute, and Triton's."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not (func.is_view or func.name() in ALLOCATES):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def launch(self, kernel, grid, args, meta):
        self.names.append(kernel.__name__)
        with torch.utils._python_dispatch._disable_current_modes():
            kernel[grid](*args, **meta)


ALLOCATES = {"aten::empty.memory_format", "aten::empty_like", "aten::new_empty", "aten::detach"}


class FewLaunches:
    """Attention in as many launches as Flash's, which a CPU lacks."""

    def __init__(self, shape, context):
        self.shape = shape

    def forward(self, turned):
        query = self.shape.split(turned)[0]
        return query.flatten(1).mul(2.0), turned

    def backward(self, attended, gradient):
        # torch: two sums of grouped keys and values, and the kernel's own three.
        for _ in range(5):
            gradient = gradient.mul(1.0)
        return torch.cat([gradient, attended[1][:, gradient.shape[1] :]], dim=1)


@interpreted
def test_a_layer_is_differentiated_in_few_launches(kernel, monkeypatch):
    from tandem.model.gpu.gradients import TritonGradientRows

    by = GradientKernels(TritonGradientRows(), FewLaunches)
    monkeypatch.setattr(training, "gradient_kernels", lambda *args: by)
    executor = make_executor(gentle("llama"), "auto", graph_bytes=0)
    open_trainer(executor)
    driver = Driver(executor)
    sequences = random_sequences(random.Random(1), 2, (Role.TARGET,))
    numbers = [driver.record("t", 0, sequences)[0] for _ in range(2)]
    driver.backward(numbers[0], (1.0, 1.0))  # joins the adapter's matrices
    counts = []
    layers = executor.info.num_layers
    for hi in range(layers, 0, -1):
        counted = Launches()
        with watched(counted.launch), counted:
            plan = BackwardSlice(numbers[1], hi, hi - 1, (1.0, 1.0))
            assert executor.training.run_slice(plan).problem is None
        counts.append(counted.names)
    # The first slice has the seed too, the last one no gradient for what is below.
    assert len(counts[1]) <= 45, counts[1]


@pytest.mark.gpu
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj", "up_proj")], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_on_a_gpu_by_hand_equals_autograd_in_float32(name, targets, made, monkeypatch):
    executor = make_executor(gentle(name).cuda(), "auto")
    found = gradients(executor, targets)
    assert set(made) == {"TorchArithmetic"}
    made.clear()
    expected = by_autograd(executor, monkeypatch, targets)
    assert made == []
    assert worst_error(found, expected) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_on_a_gpu_flash_is_as_near_to_float32_as_autograd(name, made, monkeypatch):
    expected = gradients(make_executor(wide(name, torch.float32).cuda(), "auto"))
    executor = make_executor(wide(name, torch.bfloat16).cuda(), "auto")
    made.clear()
    found = gradients(executor)
    assert set(made) == {"TorchArithmetic"}
    plain = by_autograd(executor, monkeypatch)
    ours, autograds = worst_error(found, expected), worst_error(plain, expected)
    assert ours < 0.1
    assert ours < 1.25 * autograds


@pytest.mark.gpu
def test_a_step_on_a_gpu_moves_the_parameters_as_on_the_cpu():
    pairs = random_sequences(random.Random(1), 4, (Role.CHOSEN, Role.REJECTED))
    found = []
    for device in ("cpu", "cuda"):
        executor = make_executor(gentle("llama").to(device), "auto")
        open_trainer(executor, learning_rate=1e-2)
        driver = Driver(executor)
        loss = driver.step("t", 0, LossSpec(LossKind.DPO), [pairs[:2], pairs[2:]])
        before = executor.snapshot_trainer("t").parameters.cpu()
        update = driver.update("t", 0)
        assert update.applied
        moved = executor.snapshot_trainer("t").parameters.cpu() - before
        found.append((loss, update.grad_norm, moved))
    (loss, norm, moved), (gpu_loss, gpu_norm, gpu_moved) = found
    assert gpu_loss == pytest.approx(loss, rel=1e-5)
    assert gpu_norm == pytest.approx(norm, rel=1e-4)
    # AdamW's first step is a sign: where a gradient is nearly zero, it is the rounding's.
    assert float((gpu_moved - moved).abs().mean()) < 1e-3 * float(moved.abs().mean())
