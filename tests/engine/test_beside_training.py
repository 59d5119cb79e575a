"""Requests beside training, in random situations: their answers do not change.

The whole engine but for its process, with float32 models of every family that serving is tested
with. Wherever transformers' two best logits differ by more than 1e-3 (teacher-forced) the engine
must choose the same token, with training beside it as without (`test_equality.py`). In bf16, where
a pass of another shape rounds differently, the drift of log-probabilities is measured
(`python -m benchmarks drift`) and bounded by what other prompts do to them.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from benchmarks.drift.__main__ import SEQUENCES, Drift, measure
from serving import DEMO_MODEL
from tandem.build import join_loop
from tandem.config import (
    AdapterConfig,
    CacheConfig,
    LearningConfig,
    ModelConfig,
    SchedulingConfig,
    Settings,
)
from tandem.core.plan import LanePlan, working_key
from tandem.core.ports import Urgent, never
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    OptimizerSpec,
    Role,
    StepOutcome,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.executor.executor import DeviceExecutor
from tandem.executor.kv_storage import block_bytes
from tandem.model.load import LoadedModel, load_model, prepare_model
from tiny_models import VOCAB, clear_rows, make_model, reference_logits, with_kernels
from training_harness import gentle

EXAMPLES = 60 if os.environ.get("TANDEM_TEST_FULL") else 6
OUTPUT_TOKENS = 12
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
ROLES = {
    LossKind.SFT: (Role.TARGET,) * 2,
    LossKind.DPO: (Role.CHOSEN, Role.REJECTED),
    LossKind.KTO: (Role.DESIRABLE, Role.MISMATCHED),
}
PROMPTS = st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=20)


@dataclass
class Mix:
    """One random situation: requests, steps before each of them, and iterations between them."""

    block_size: int
    blocks: int
    max_batch_tokens: int
    policy: str
    requests: list[tuple[list[int], list[LossKind], int]] = field(default_factory=list)
    trails: bool = False  # as on a GPU: slices may end after the result of their plan


@st.composite
def mixes(draw: Any) -> Mix:
    block_size = draw(st.sampled_from([4, 16]))
    least = -(-2 * (28 + OUTPUT_TOKENS) // block_size)
    mix = Mix(
        block_size,
        draw(st.integers(least, 5 * least)),
        draw(st.integers(8, 80)),
        draw(st.sampled_from(["unified", "fcfs", "adainf", "ekya", "priority"])),
        trails=draw(st.booleans()),
    )
    for _ in range(draw(st.integers(2, 4))):
        steps = draw(st.lists(st.sampled_from(sorted(LossKind)), max_size=2))
        mix.requests.append((draw(PROMPTS), steps, draw(st.integers(0, 4))))
    mix.requests[0][1].append(LossKind.DPO)
    return mix


@dataclass
class Met:
    """What the examples came across, so that no dimension can vanish unnoticed."""

    shared_passes: int = 0
    slices: int = 0
    updates: int = 0
    positions: int = 0
    clear: int = 0


@cache
def loaded(name: str, kernels: str) -> LoadedModel:
    return prepare_model(make_model(name), ModelConfig(model=name, kernels=kernels))


@cache
def reference(name: str) -> Any:
    return make_model(name)


def step(name: str, kind: LossKind, rng: random.Random) -> TrainingStep:
    sequences = []
    for role in ROLES[kind] * rng.randint(1, 2):
        length, prompt = rng.randint(6, 24), rng.randint(1, 4)
        tokens = tuple(rng.randrange(3, VOCAB) for _ in range(length))
        sequences.append(TrainingSequence(tokens, prompt, role, -20.0))
    return TrainingStep(name, "t", LossSpec(kind), (tuple(sequences),))


class Leaking(DeviceExecutor):
    """Lets the working parameters of the trainer into everybody's rows."""

    def submit(self, plan: LanePlan, urgent: Urgent = never) -> int:
        spans = tuple(structs.replace(span, adapter=working_key("t")) for span in plan.spans)
        return super().submit(replace(plan, spans=spans), urgent)


def answers(model: LoadedModel, mix: Mix, met: Met, *, leak: bool = False) -> list[list[int]]:
    cache_config = CacheConfig(mix.block_size, mix.blocks * block_bytes(model, mix.block_size))
    # Objectives that leave learning room beside answers on any machine.
    scheduling = SchedulingConfig(mix.policy, 6, mix.max_batch_tokens, ttft_slo=1e3, tpot_slo=1e2)
    learning = LearningConfig(recording_tokens=200)
    make = Leaking if leak else DeviceExecutor
    executor = make(model, cache_config, scheduling, AdapterConfig(), learning)
    executor._trails = mix.trails
    config = Settings(cache=cache_config, scheduling=scheduling)
    loop = join_loop(config, executor, check_every_step=True)
    submit = executor.submit

    def noted(plan: LanePlan, urgent: Urgent = never) -> int:
        of_training = [span.record is not None for span in plan.spans]
        met.shared_passes += len(set(of_training)) == 2
        met.slices += bool(plan.slices)  # requests wait or run in all iterations
        met.updates += len(plan.updates)
        return submit(plan, urgent)

    executor.submit = noted  # type: ignore[method-assign]
    loop.teaching.open_trainer(
        TrainerSpec("t", LoraSpec(rank=4), OptimizerSpec(learning_rate=2e-2))
    )
    found: list[list[int]] = [[] for _ in mix.requests]

    def iterate() -> None:
        for event in loop.step():
            assert event.error is None, event.error
            found[int(event.request_id)].extend(event.tokens)
        for outcome in loop.teaching.take_learned():
            assert isinstance(outcome, StepOutcome) and outcome.applied, outcome

    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    rng = random.Random(3)
    for place, (prompt, kinds, pause) in enumerate(mix.requests):
        for number, kind in enumerate(kinds):
            loop.teaching.add_step(step(f"{place}-{number}", kind, rng))
        loop.add(Request(str(place), tuple(prompt), sampling))
        for _ in range(pause):
            iterate()
    while any(len(answer) < OUTPUT_TOKENS for answer in found):
        iterate()
    loop.teaching.close_trainer("t")
    return found


def wrong(name: str, prompt: list[int], answer: list[int], met: Met) -> list[int]:
    """Places where transformers decides clearly and the answer is another."""
    logits = reference_logits(reference(name), prompt + answer)[len(prompt) - 1 : -1]
    clear = clear_rows(logits)
    met.positions += len(answer)
    met.clear += int(clear.sum())
    return (clear & (logits.argmax(-1) != torch.tensor(answer))).nonzero().flatten().tolist()


@pytest.mark.parametrize(("name", "kernels"), with_kernels(FAMILIES))
def test_greedy_answers_are_transformers_own_beside_training(name: str, kernels: str) -> None:
    model, met = loaded(name, kernels), Met()

    @settings(max_examples=EXAMPLES, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(mix=mixes())
    def run(mix: Mix) -> None:
        prompts = [prompt for prompt, *_ in mix.requests]
        for prompt, answer in zip(prompts, answers(model, mix, met), strict=True):
            assert wrong(name, prompt, answer, met) == []

    run()
    assert met.clear >= 0.95 * met.positions, "the test model does not decide clearly"
    assert met.shared_passes > EXAMPLES and met.slices > 0 and met.updates > 0, met


@pytest.mark.parametrize(("name", "kernels"), with_kernels(FAMILIES))
def test_a_leak_of_the_trained_adapter_is_noticed(name: str, kernels: str) -> None:
    """Negative control, in a situation with enough steps for the adapter to matter."""
    prompt = list(range(20, 30))
    mix = Mix(16, 64, 64, "adainf", [([9, 8], [LossKind.SFT] * 6, 0), (prompt, [], 0)])
    met = Met()
    found = answers(loaded(name, kernels), mix, met, leak=True)
    assert met.updates > 0
    assert any(
        wrong(name, prompt, answer, met)
        for (prompt, *_), answer in zip(mix.requests, found, strict=True)
    )


def check_drift(found: dict[str, Drift]) -> None:
    """No more than twice what prompts of the same rows do, and less than bf16's own rounding."""
    prompts, training, rounding = found["prompts"], found["training"], found["rounding"]
    print({cause: (round(d.mean, 5), round(d.largest, 5)) for cause, d in found.items()})
    assert training.mean <= 2 * prompts.mean + 1e-4
    assert training.mean <= rounding.mean
    assert training.largest <= 2 * prompts.largest + rounding.mean
    # Negative control: an adapter in the wrong rows would be far outside.
    leak = found["leak"]
    assert leak.mean > 2 * rounding.mean > 2 * prompts.mean + 1e-4


@pytest.mark.parametrize(
    ("kernels", "together"),
    [
        pytest.param("auto", 1, marks=pytest.mark.full),
        pytest.param("auto", 8, marks=pytest.mark.full),
        pytest.param("off", 8, marks=pytest.mark.full),
    ],
)
def test_log_probs_of_the_demo_model_drift_within_bounds_in_bf16(
    kernels: str, together: int
) -> None:
    inexact, exact = (
        load_model(ModelConfig(str(DEMO_MODEL), dtype=dtype, kernels=kernels))
        for dtype in ("bfloat16", "float32")
    )
    check_drift(measure(inexact, exact, together))


@pytest.mark.parametrize(
    ("name", "kernels"), with_kernels(FAMILIES, quick=["llama", "gemma3"], plain=[])
)
def test_log_probs_drift_within_bounds_in_bf16(name: str, kernels: str) -> None:
    inexact, exact = (
        prepare_model(gentle(name, dtype), ModelConfig(model=name, kernels=kernels))
        for dtype in (torch.bfloat16, torch.float32)
    )
    check_drift(measure(inexact, exact, SEQUENCES))
