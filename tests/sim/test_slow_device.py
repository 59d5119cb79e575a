"""Learning keeps away while requests come, where one layer of it is longer than they can wait."""

from __future__ import annotations

from random import Random

from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.events import ModelInfo
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.estimators.latency import FORWARD_TERMS, Rates
from tandem.estimators.profile import Ceilings, Profile
from tandem.sim.curves import Saturating
from tandem.sim.executor import SimExecutor
from tandem.sim.run import Arrival, SimReport, Simulation

# Serving is fast, learning is not: 64 recorded rows take a second for each of eight layers.
FORWARD = {
    "pass": 0.01, "decode": 1e-4, "context": 1e-4, "longest": 1e-5, "mean": 1e-5, "row": 1e-3,
    "pairs": 1e-3, "draw": 1e-5, "scored": 1e-5, "recording": 0.01, "recorded": 0.125,
}  # fmt: skip
RATES = Rates(
    tuple(FORWARD[term] for term in FORWARD_TERMS),
    (1e-3, 1.0, 1e-5, 1e-5, 1e-5, 1e-3, 1e-5), 0.01, 1.0, True, True,
)  # fmt: skip
INFO = ModelInfo(
    model="slow", architecture="none", device="none", dtype="float32", vocab_size=1000,
    max_model_len=4096, eos_token_ids=(), block_size=16, num_blocks=8000, num_parameters=61_000_000,
    weight_bytes=244_000_000, kernels="none", num_layers=8, recording_tokens=50_000,
)  # fmt: skip
PROFILE = Profile(INFO, RATES, Ceilings(2e11, 2e10), "made up")
SLO = Slo(ttft_s=0.4, tpot_s=0.1)
SECONDS, EVERY_S = 240.0, 3.0
STEPS = 3


def run(**options: float) -> SimReport:
    """Three steps from the beginning, and requests for some minutes."""
    random, work, at_s = Random(0), [], 0.0
    for number in range(STEPS):
        tokens = tuple((7 * place + number) % 1000 for place in range(256))
        batch = (TrainingSequence(tokens, 1, Role.TARGET),)
        step = TrainingStep(f"step-{number}", "learner", LossSpec(LossKind.SFT), (batch,))
        work.append(Arrival(1.0, step))
    while (at_s := at_s + random.expovariate(1 / EVERY_S)) < SECONDS:
        params = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
        work.append(Arrival(at_s, Request(f"r{len(work)}", tuple(range(50)), params, slo=SLO)))
    work.sort(key=lambda arrival: arrival.at_s)
    clock = VirtualClock()
    executor = SimExecutor(PROFILE, clock, curve=Saturating())
    given = {name: f"{value}" for name, value in options.items()}
    config = {"policy": "unified", "policy_options": given, "ttft_slo": SLO.ttft_s}
    loop = join_loop(resolve({"scheduling": config}), executor, clock=clock, rates=RATES)
    return Simulation(loop, clock, work, [TrainerSpec("learner")], leaps=executor).run()


def late(report: SimReport) -> int:
    return sum(not one.ttft_s <= SLO.ttft_s for one in report.outcomes.values())


def test_requests_keep_their_objective_and_learning_goes_on_when_nobody_comes():
    kept = run()
    assert len(kept.outcomes) > 50
    assert late(kept) <= 5  # it is tried now and then
    assert len(kept.steps) == STEPS
    assert kept.ended_s > SECONDS + 30.0
    # Not patient, it begins as soon as the engine is idle.
    assert late(run(patience_s=0.01)) > 20
