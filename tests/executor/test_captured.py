"""Captured passes give what passes layer by layer give, through the executor."""

from __future__ import annotations

import logging
import os
import random
from itertools import pairwise

import pytest
import torch

import tiny_models
from devices import INTERPRETED, TRITON_DEVICE
from fake_capture import FakeCapture, NotCapturable
from interpreted import interpreted
from tandem.config import AdapterConfig, CacheConfig, LearningConfig, SchedulingConfig
from tandem.core.plan import (
    DEVICE_LANE,
    Draw,
    LanePlan,
    OpenMicroBatch,
    RecordTarget,
    Span,
    StepResult,
    working_key,
)
from tandem.core.sampling import SamplingParams
from tandem.executor import captured as captured_passes
from tandem.executor.capture import Capture, CudaCapture
from tandem.executor.captured import buckets
from tandem.executor.executor import DeviceExecutor
from tandem.model.load import LoadedModel
from tandem.model.lora_files import Lora, LoraWeights
from training_harness import open_trainer

# What padding computes is anything, also what NumPy warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
BLOCK, NUM_BLOCKS, MOST_ROWS, MOST_SEQUENCES = 4, 64, 12, 4
# The interpreter takes milliseconds a program: one for each tile, KV head and layer.
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
GREEDY = SamplingParams(temperature=0.0)
NEEDS_INTERPRETER = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
WARM = SamplingParams(temperature=0.9, top_p=0.8, seed=7)


def executor_of(loaded, **learning) -> DeviceExecutor:
    each = sum(2 * s.kv_heads * s.head_dim for s in loaded.layers) * BLOCK * 4
    return DeviceExecutor(
        loaded,
        CacheConfig(block_size=BLOCK, memory_bytes=NUM_BLOCKS * each),
        SchedulingConfig(max_sequences=MOST_SEQUENCES, max_batch_tokens=MOST_ROWS),
        AdapterConfig(),
        LearningConfig(recording_tokens=64, **learning),
    )


def capture_on(device: str) -> Capture:
    return FakeCapture() if device == "cpu" else CudaCapture(torch.device(device))


@pytest.fixture(params=[TRITON_DEVICE])
def pair(request):
    """Two executors of one model: layer by layer, and captured."""
    loaded = interpreted(device=request.param, **SMALL)
    eager, captured = executor_of(loaded), executor_of(loaded)
    for name, targets in (("a", ("q_proj", "v_proj")), ("b", ("o_proj", "down_proj"))):
        loaded.lora.add(name, adapter_of(loaded, targets))
    capture = capture_on(request.param)
    captured.capture_passes(capture, 0.0)
    return eager, captured, capture


def adapter_of(loaded: LoadedModel, targets: tuple[str, ...]) -> Lora:
    def random_matrix(*size: int) -> torch.Tensor:
        return 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(3)).to(loaded.device)

    return {
        name: LoraWeights(random_matrix(4, shape.inputs), random_matrix(shape.outputs, 4), 2.0)
        for name, shape in loaded.lora.linears.items()
        if name.endswith(targets)
    }


def run(executor: DeviceExecutor, *spans: Span, **parts) -> StepResult:
    executor.submit(LanePlan(0, DEVICE_LANE, spans, **parts))
    (result,) = executor.poll()
    assert result.failed == ()
    return result


def assert_same(found: StepResult, expected: StepResult) -> None:
    assert found.draws == expected.draws
    assert len(found.scores) == len(expected.scores)
    for one, other in zip(found.scores, expected.scores, strict=True):
        assert (one.seq_id, one.start) == (other.seq_id, other.start)
        assert one.total == pytest.approx(other.total, abs=1e-4)


FULL = os.environ.get("TANDEM_TEST_FULL")


class Texts:
    """Random texts, of which each iteration computes some more: chunks or single tokens."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self.next_id = 0
        self.open: list[tuple[Span, int]] = []  # the whole text as a span, and what is done

    def begin(self) -> None:
        length = self.rng.randint(4, 9)
        tokens = tuple(self.rng.randrange(3, tiny_models.VOCAB) for _ in range(length))
        table = tuple(self.free.pop() for _ in range(-(-length // BLOCK)))
        self.next_id += 10
        adapter = self.rng.choice([None, "a", "b"])
        self.open.append((Span(self.next_id, 0, tokens, (table,), adapter), 0))

    def spans(self, single: bool) -> list[Span]:
        """The next spans of some texts; ends give their blocks back."""
        while len(self.open) < MOST_SEQUENCES:
            self.begin()
        spans, left, rows = [], [], MOST_ROWS
        for whole, done in self.open:
            most = 1 if single else min(len(whole.tokens) - done, rows)
            count = self.rng.randint(1, most) if most > 0 else 0
            if not count or self.rng.random() < 0.3:
                left.append((whole, done))
                continue
            rows -= count
            spans.append(self._part(whole, done, count))
            if done + count < len(whole.tokens):
                left.append((whole, done + count))
            else:
                self.free = list(whole.block_tables[0]) + self.free
        self.open = left
        return spans

    def _part(self, whole: Span, start: int, count: int) -> Span:
        first, rng = whole.seq_id, self.rng
        draws = tuple(
            Draw(first + choice, choice, start, rng.choice([GREEDY, GREEDY, WARM]))
            for choice in range(rng.choice([0, 1, 1, 1, 2]))
        )
        tokens = whole.tokens[start : start + count]
        scored = rng.random() < 0.2
        return Span(
            first,
            start,
            tokens,
            whole.block_tables,
            whole.adapter,
            draws,
            tokens if scored else (),
            None,
        )


def test_changing_batches_have_the_same_tokens(pair) -> None:
    eager, captured, capture = pair
    texts = Texts(random.Random(1))
    for step in range(6 if FULL else 4):
        spans = texts.spans(single=step % 2 == 0)
        if spans:
            assert_same(run(captured, *spans), run(eager, *spans))
    if isinstance(capture, FakeCapture):
        assert capture.replays >= capture.records > 2
    for ours, theirs in zip(captured._storage.layers, eager._storage.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-4, rtol=1e-4)


def test_recorded_rows_are_those_of_passes_layer_by_layer(pair) -> None:
    eager, captured, capture = pair
    found = []
    for executor, name in ((eager, "e"), (captured, "c")):
        open_trainer(executor, name=name)
        decode = Span(1, 0, (9,), ((40,),), draws=(Draw(1, 0, 0, GREEDY),))
        record = [
            Span(
                100 + sequence,
                0,
                tokens,
                ((3 * sequence, 3 * sequence + 1),),
                working_key(name),
                score_targets=(*tokens[1:], 5),
                score_top=None,
                record=RecordTarget(7, sequence),
            )
            for sequence, tokens in enumerate([(5, 6, 7, 8, 9), (11, 12, 13)])
        ]
        opens = (OpenMicroBatch(7, name, 0, (5, 3)),)
        first = [part_of(record[0], 0, 2), decode]
        result = run(executor, *first, opens=opens)
        rest = [part_of(record[0], 2, 5), record[1], decode]
        again = run(executor, *rest)
        recordings = executor.training.recordings
        recording = recordings.get(7)
        assert recording is not None and recording.complete and recording.slopes is not None
        rows = recordings.rows(recording)
        assert rows is not None and rows.abs().sum() > 0
        found.append((result, again, rows.cpu(), recording.slopes.cpu()))
    for one, other in zip(found[1], found[0], strict=True):
        if isinstance(one, StepResult):
            assert_same(one, other)
        else:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    if isinstance(capture, FakeCapture):
        assert capture.records == 2


def part_of(span: Span, start: int, stop: int) -> Span:
    return Span(
        span.seq_id,
        start,
        span.tokens[start:stop],
        span.block_tables,
        span.adapter,
        score_targets=span.score_targets[start:stop],
        score_top=None,
        record=span.record,
    )


def test_a_pass_with_a_bad_number_fails_alone(pair) -> None:
    _, captured, _ = pair
    spans = [Span(n, 0, (n + 3,), ((n,),), draws=(Draw(n, 0, 0, GREEDY),)) for n in range(3)]
    run(captured, *spans)
    captured._storage.layers[0].values[1] = torch.nan
    later = [Span(s.seq_id, 1, (4,), s.block_tables, draws=s.draws) for s in spans]
    captured.submit(LanePlan(0, DEVICE_LANE, tuple(later)))
    (result,) = captured.poll()
    assert [seq_id for seq_id, _ in result.failed] == [1]
    assert [draw.seq_id for draw in result.draws] == [0, 2]


@NEEDS_INTERPRETER
def test_the_usual_passes_are_recorded_before_the_first_request() -> None:
    captured = executor_of(interpreted(**SMALL | {"num_hidden_layers": 1}))
    capture = FakeCapture()
    captured.capture_passes(capture, 1e9)
    records = capture.records
    # Decodes of 1, 2, 4 rows, without adapters and with; 1, 2, 4, 8 or 12 rows with recorded ones.
    assert records == 6 + 5
    run(captured, Span(1, 0, (5,), ((3,),), draws=(Draw(1, 0, 0, GREEDY),)))
    assert capture.records == records


@NEEDS_INTERPRETER
def test_a_model_that_waits_for_its_device_is_served_layer_by_layer(caplog) -> None:
    loaded = interpreted(**SMALL)
    head = loaded.head.linear.forward

    def waits(hidden):
        return head(hidden) if bool(hidden.isfinite().any()) else hidden

    captured = executor_of(loaded)
    loaded.head.linear.forward = waits
    with caplog.at_level(logging.WARNING):
        captured.capture_passes(FakeCapture(), 60.0)
        for _ in range(2):
            result = run(captured, Span(1, 0, (5,), ((3,),), draws=(Draw(1, 0, 0, GREEDY),)))
            assert len(result.draws) == 1
    assert caplog.text.count("a pass cannot be captured") == 1


@pytest.mark.full
@NEEDS_INTERPRETER
def test_after_a_shortage_passes_are_captured_again_a_while_later(caplog, monkeypatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(captured_passes.time, "monotonic", lambda: now_s)
    recorded: list[int] = []

    class Short(FakeCapture):
        def record(self, call):
            recorded.append(1)
            if len(recorded) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().record(call)

    captured = executor_of(interpreted(**SMALL))
    captured.capture_passes(Short(), 0.0)
    counts = []
    for pause_s in (0.0, 30.0, 31.0, 0.0):
        now_s += pause_s
        result = run(captured, Span(1, 0, (5,), ((3,),), draws=(Draw(1, 0, 0, GREEDY),)))
        counts.append(len(recorded))
        assert len(result.draws) == 1
    assert counts == [1, 1, 2, 2]
    assert caplog.text.count("a pass cannot be captured") == 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.all()),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0]),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
    ],
)
def test_the_fake_refuses_what_a_gpu_cannot_capture(wait) -> None:
    x = torch.ones(4)
    with pytest.raises(NotCapturable):
        FakeCapture().record(lambda: wait(x))


def test_the_fake_shows_a_value_that_was_baked_in() -> None:
    x, out, factor = torch.ones(3), torch.zeros(3), [2.0]

    def call() -> None:
        out.copy_((x * factor[0]).view(3).add_(1.0))

    replay = FakeCapture().record(call)
    x.fill_(5.0)
    factor[0] = 100.0
    replay()
    assert out.tolist() == [11.0, 11.0, 11.0]


def test_sizes_are_few_and_waste_little() -> None:
    sizes = buckets(1024)
    assert sizes[:8] == [1, 2, 4, 8, 16, 24, 32, 40] and sizes[-1] == 1024
    assert len(sizes) < 50 and sizes == sorted(set(sizes))
    assert all(after <= 1.13 * before for before, after in pairwise(sizes) if before >= 64)
    assert buckets(24) == [1, 2, 4, 8, 16, 24] and buckets(70)[-1] == 70 and buckets(1) == [1]


@pytest.mark.gpu
def test_a_capture_that_failed_leaves_the_device_usable() -> None:
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    capture = CudaCapture(x.device)
    with pytest.raises(RuntimeError):
        capture.record(lambda: out.fill_(x.sum().item()))

    def call() -> None:
        out.copy_(x * 2.0)

    replay = capture.record(call)
    x.fill_(3.0)
    replay()
    assert out.tolist() == [6.0] * 4
