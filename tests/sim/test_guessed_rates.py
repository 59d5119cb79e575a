"""A scheduler that starts from guesses trains beside requests as fast as one that was told."""

from __future__ import annotations

import os

import pytest

from rates import slice_rates
from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.events import ModelInfo
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Ceilings, Profile
from tandem.estimators.terms import FORWARD_TERMS
from tandem.sim.curves import Saturating
from tandem.sim.executor import SimExecutor
from tandem.sim.timeline import Timeline

# A model of half a billion parameters on two processor cores, as `tandem profile` measured it (the
# terms of slices apart by estimate); one pass in fifty meets a busy machine and takes several times
# as long.
FORWARD = {
    "pass": 0.0483, "decode": 2.98e-4, "context": 1.07e-3, "longest": 2.02e-4, "mean": 2.17e-4,
    "row": 4.14e-4, "pairs": 0.0179, "draw": 3.37e-4, "scored": 3.9e-6, "recording": 0.0475,
    "recorded": 2.98e-4, "whole": 1e-9, "whole_row": 1e-9, "cold": 1e-9,
}  # fmt: skip
RATES = Rates(
    tuple(FORWARD[term] for term in FORWARD_TERMS),
    slice_rates(
        slice=5.2e-3,
        layer=2.6e-3,
        layer_row=2.4e-5,
        again_row=1.2e-5,
        rest_row=5e-6,
        first=4e-3,
        first_row=1e-5,
    ),
    0.0128,
    0.8,
    True,
    True,
)
NOISE = (*[-0.14 + 0.008 * place for place in range(36)], 3.35)
INFO = ModelInfo(
    model="half-a-billion", architecture="none", device="none", dtype="bfloat16",
    vocab_size=1000, max_model_len=4096, eos_token_ids=(), block_size=16, num_blocks=5000,
    num_parameters=494_000_000, weight_bytes=988_000_000, kernels="none", num_layers=24,
    recording_tokens=50_000,
)  # fmt: skip
PROFILE = Profile(INFO, RATES, Ceilings(2e12, 2e10), "made up", noise={"pass": NOISE})
SECONDS = 60.0
SEEDS = 6 if os.environ.get("TANDEM_TEST_FULL") else 3


def training_tokens_per_s(seed: int, tpot_slo: float, rates: Rates | None) -> float:
    """Eight requests always decoding, two steps always waiting."""
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    executor = SimExecutor(PROFILE, clock, curve=Saturating(), seed=seed, on_plan=timeline)
    config = resolve({"scheduling": {"tpot_slo": tpot_slo}})
    loop = join_loop(config, executor, clock=clock, rates=rates)
    loop.teaching.open_trainer(TrainerSpec("learner"))
    requests = steps = running = 0
    while clock.now() < SECONDS:
        for _ in range(8 - running):
            # The first ones end one after the other, so that the later ones do not move in step.
            length = 8 * (requests + 1) if requests < 8 else 64
            prompt = tuple((31 * place + requests) % 1000 for place in range(128))
            params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
            loop.add(Request(f"request-{requests}", prompt, params))
            requests += 1
        running = 8
        while clock.now() > 1.0 and len(loop.scheduler.learning.queued) < 2:
            loop.teaching.add_step(sft_step(steps))
            steps += 1
        running -= sum(event.finish_reason is not None for event in loop.step())
        loop.teaching.take_learned()
    return sum(moment.training for moment in timeline.moments) / SECONDS


def sft_step(number: int) -> TrainingStep:
    tokens = tuple((7 * place + number) % 1000 for place in range(512))
    group = tuple(TrainingSequence(tokens, 1, Role.TARGET) for _ in range(2))
    return TrainingStep(f"step-{number}", "learner", LossSpec(LossKind.SFT), (group,))


@pytest.mark.parametrize("tpot_slo", [0.10, 0.12])
def test_guessed_rates_cost_little_training(tpot_slo):
    all_told = 0.0
    for seed in range(SEEDS):  # each beside the same disturbances
        told = training_tokens_per_s(seed, tpot_slo, RATES)
        all_told += told
        assert training_tokens_per_s(seed, tpot_slo, None) > 0.7 * told
    assert all_told > SEEDS * 80.0


def test_a_prediction_that_is_far_too_long_is_corrected_by_a_try():
    """Otherwise nothing fits, nothing runs, and nothing is ever measured again: learning would stop
    for a minute, and this load got 34 tokens/s."""
    assert training_tokens_per_s(4, 0.10, None) > 90.0
