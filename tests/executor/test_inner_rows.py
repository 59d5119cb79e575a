"""What layers on a GPU export of recorded rows: gradients are the same with it, without it, and by
autograd, in passes that are captured and in those that are not."""

from __future__ import annotations

import random

import pytest
import torch

import tiny_models
from devices import TRITON_DEVICE
from fake_capture import FakeCapture
from interpreted import interpreted
from tandem.config import AdapterConfig, CacheConfig, LearningConfig, SchedulingConfig
from tandem.core.errors import AccountingError
from tandem.core.plan import Draw, Span
from tandem.core.sampling import SamplingParams
from tandem.core.training import Role, TrainingSequence
from tandem.executor.capture import CudaCapture
from tandem.executor.executor import DeviceExecutor
from tandem.model import kernels, layer_gradient
from tandem.model.layer_gradient import Inner
from training_harness import (
    BLOCK,
    NUM_BLOCKS,
    Driver,
    make_executor,
    open_trainer,
    our_gradients,
    random_sequences,
    wide,
    worst_error,
)

pytestmark = [
    pytest.mark.skipif(not kernels.status().available, reason="no kernels"),
    # What padding computes is anything, also what NumPy warns of.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
LAYERS, ROWS, FEW = 2, 40, 12
SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ROW_BYTES = LAYERS * (32 + 2 * 48) * 4
COEFFICIENTS = (1.0, -0.5)


class Beside(Driver):
    """A request decodes in every pass."""

    def neighbours(self):
        draw = Draw(1, 0, 0, SamplingParams(temperature=0.0))
        return [Span(1, 0, (9,), ((40,),), draws=(draw,))]


def made(device: str, budget_rows: int = ROWS, recording_tokens: int = ROWS, captured: bool = True):
    loaded = interpreted(device=device, **SHAPE)
    each = sum(2 * s.kv_heads * s.head_dim for s in loaded.layers) * BLOCK * 4
    executor = DeviceExecutor(
        loaded,
        CacheConfig(block_size=BLOCK, memory_bytes=NUM_BLOCKS * each),
        SchedulingConfig(max_sequences=4, max_batch_tokens=24),
        AdapterConfig(),
        LearningConfig(recording_tokens=recording_tokens, graph_bytes=budget_rows * ROW_BYTES),
    )
    if captured:
        capture = FakeCapture() if device == "cpu" else CudaCapture(torch.device(device))
        executor.capture_passes(capture, 0.0)
    open_trainer(executor)
    return executor


def sequences(lengths=(7, 6), seed: int = 1) -> list[TrainingSequence]:
    rng = random.Random(seed)
    return [
        TrainingSequence(
            tuple(rng.randrange(3, tiny_models.VOCAB) for _ in range(length)), 2, Role.TARGET
        )
        for length in lengths
    ]


def record(executor, chunks: bool = True, beside: bool = True, lengths=(7, 6)) -> int:
    """Record a micro-batch, in `chunks` and `beside` a decode if so; its number."""
    driver = (Beside if beside else Driver)(executor, random.Random(3) if chunks else None)
    driver.numbers = len(executor.training.recordings.of("t")) + 10 * len(lengths)
    number, _ = driver.record("t", 0, sequences(lengths))
    executor.training.check()
    return number


def at_once(executor, lengths=(7, 6)) -> int:
    """Record a micro-batch in one pass of its own."""
    return record(executor, chunks=False, beside=False, lengths=lengths)


def kept(executor, number: int) -> list[int]:
    recording = executor.training.recordings.get(number)
    assert all(isinstance(each, Inner) for each in recording.graphs.values())
    return sorted(recording.graphs)


def gradients(executor, number: int):
    Driver(executor).backward(number, COEFFICIENTS)
    executor.training.check()
    return our_gradients(executor)


@pytest.fixture(scope="module")
def expected():
    """By autograd, of nothing but recorded inputs."""
    executor = made(TRITON_DEVICE, budget_rows=0, captured=False)
    assert executor.memory_bytes()["graphs"] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_gradient.LayerGradients, "of", lambda *args: None)
        return gradients(executor, at_once(executor))


@pytest.mark.parametrize(
    ("captured", "chunks", "beside"),
    [
        (False, True, True),
        pytest.param(True, True, True, marks=pytest.mark.full),
        pytest.param(True, False, False, marks=pytest.mark.full),
    ],
)
def test_gradients_are_those_of_autograd(captured, chunks, beside, expected, monkeypatch):
    executor = made(TRITON_DEVICE, captured=captured)
    number = record(executor, chunks, beside)
    assert kept(executor, number) == list(range(LAYERS))
    assert executor.memory_bytes()["graphs"] == ROWS * ROW_BYTES
    spared = []
    forward = layer_gradient.LayerGradient.forward

    def noted(self, x, inner=None):
        spared.append(inner is not None)
        return forward(self, x, inner)

    monkeypatch.setattr(layer_gradient.LayerGradient, "forward", noted)
    assert worst_error(gradients(executor, number), expected) < 1e-5
    assert spared == [True] * LAYERS


def test_control_rows_of_another_layer_are_noticed(expected):
    executor = made(TRITON_DEVICE, captured=False)
    number = at_once(executor)
    graphs = executor.training.recordings.get(number).graphs
    graphs[0] = graphs[1]
    assert worst_error(gradients(executor, number), expected) > 1e-2


@pytest.mark.full
def test_results_say_what_is_kept():
    executor = made(TRITON_DEVICE, captured=False)
    found = []
    run = Driver.run

    class Noting(Beside):
        def run(self, *spans, **parts):
            result = run(self, *spans, **parts)
            found.extend(result.kept)
            return result

    Noting(executor).record("t", 0, sequences())
    assert [(each.whole, each.inner) for each in found] == [(0.0, 1.0)]


@pytest.mark.full
def test_rows_past_the_budget_are_computed_again(expected):
    executor = made(TRITON_DEVICE, budget_rows=FEW, captured=False)
    first = at_once(executor, lengths=(7, 6))
    second = at_once(executor, lengths=(4, 6, 3))
    assert kept(executor, first) == list(range(LAYERS))
    assert kept(executor, second) == []
    executor.training.recordings.close(second)
    assert worst_error(gradients(executor, first), expected) < 1e-5
    third = at_once(executor, lengths=(7, 6))
    assert kept(executor, third) == list(range(LAYERS)), "its rows are free again"


@pytest.mark.full
def test_a_recording_that_moves_drops_what_lies_by_row(expected):
    executor = made(TRITON_DEVICE, recording_tokens=28, captured=False)
    first = at_once(executor, lengths=(4, 3, 4))
    second = at_once(executor)
    recordings = executor.training.recordings
    assert recordings.get(second).first_row == 8
    recordings.close(first)
    third = at_once(executor, lengths=(16,))
    assert recordings.get(second).first_row == 0
    assert kept(executor, second) == [] and kept(executor, third) == list(range(LAYERS))
    recordings.close(third)
    assert worst_error(gradients(executor, second), expected) < 1e-5


@pytest.mark.full
def test_a_layer_that_gives_nothing_is_not_kept(expected, monkeypatch):
    executor = made(TRITON_DEVICE, captured=False)
    monkeypatch.setattr(executor._model.stack.taps[1].module.whole, "run", lambda *_: None)
    number = at_once(executor)
    assert kept(executor, number) == [0]
    assert worst_error(gradients(executor, number), expected) < 1e-5


@pytest.mark.full
def test_check_finds_graphs_without_a_place():
    executor = made(TRITON_DEVICE, budget_rows=FEW, captured=False)
    number = at_once(executor)
    recordings = executor.training.recordings
    graphs = recordings.get(number).graphs
    recordings.close(number)
    first = at_once(executor, lengths=(9,))
    second = at_once(executor)
    recordings.get(second).graphs = graphs
    with pytest.raises(AccountingError, match="no place"):
        executor.training.check()
    recordings.close(first)


@pytest.mark.gpu
def test_on_a_gpu_in_bfloat16_gradients_are_as_good_as_without():
    found = {}
    for key, dtype, budget in (
        ("exact", torch.float32, 0),
        ("without", torch.bfloat16, 0),
        ("with", torch.bfloat16, 1 << 24),
    ):
        executor = make_executor(wide("llama", dtype).cuda(), "auto", graph_bytes=budget)
        executor.capture_passes(CudaCapture(torch.device("cuda")), 0.0)
        open_trainer(executor)
        driver = Beside(executor, random.Random(3))
        number, _ = driver.record("t", 0, random_sequences(random.Random(1), 2, (Role.TARGET,)))
        assert bool(kept(executor, number)) == (key == "with")
        found[key] = gradients(executor, number)
    ours, plain = (worst_error(found[key], found["exact"]) for key in ("with", "without"))
    assert ours < 0.1
    assert ours < 1.25 * plain
