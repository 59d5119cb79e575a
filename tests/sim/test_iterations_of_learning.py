"""Where each iteration costs the loop some time, learning is put into those of the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rates import slice_rates
from tandem.build import join_loop
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.plan import LanePlan
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
from tandem.estimators.datasheet import datasheet_profile
from tandem.sim.curves import Saturating
from tandem.sim.executor import SimExecutor
from tandem.sim.run import Arrival, Simulation

NOTHING = 1e-9
PASS_S, LAYER_S, ROWS, LAYERS = 7.2e-3, 0.65e-3, 512, 32
TPOT = 16.8e-3
MARGIN = 1.04  # no prediction is wrong here
SHEET = datasheet_profile("l4", "qwen2.5-0.5b")
# About an 8B model on an H100: a decode, a row of training, a layer of one micro-batch.
RATES = replace(
    SHEET.rates,
    forward=(PASS_S, 2e-5, *[NOTHING] * 3, 2e-5, *[NOTHING] * 8),
    slices=slice_rates(NOTHING, layer_row=LAYER_S / ROWS),
    update_s=2e-3,
    rho=1.0,
    measured=True,
    slices_measured=True,
)


def sft_step(number: int) -> TrainingStep:
    tokens = tuple((7 * place + number) % 1000 for place in range(ROWS + 1))
    groups = tuple((TrainingSequence(tokens, 1, Role.TARGET),) for _ in range(8))
    return TrainingStep(f"step-{number}", "learner", LossSpec(LossKind.SFT), groups)


def run(host_s: float) -> tuple[float, float, float]:
    """Of long answers beside training: trained tokens a second, TPOT, and the share of iterations
    with slices that have no answers."""
    info = replace(
        SHEET.info, num_layers=LAYERS, num_blocks=4096, max_model_len=4096, recording_tokens=8192
    )
    profile, clock = replace(SHEET, info=info, rates=RATES, host_s=host_s, noise={}), VirtualClock()
    plans: list[LanePlan] = []
    executor = SimExecutor(
        profile, clock, curve=Saturating(), on_plan=lambda plan, _: plans.append(plan)
    )
    loop = join_loop(resolve({}), executor, clock=clock, rates=RATES)
    sampling = SamplingParams(max_tokens=256, temperature=0.0, ignore_eos=True)
    requests = [
        Request(f"r{n}", tuple(range(64)), sampling, slo=Slo(1.0, TPOT), arrival_s=0.05 * n)
        for n in range(4)
    ]
    steps = iter(range(1000))
    simulation = Simulation(
        loop,
        clock,
        [Arrival(each.arrival_s, each) for each in requests],
        [TrainerSpec("learner")],
        supply=lambda: sft_step(next(steps)),
    )
    report = simulation.run()
    assert all(each.finished for each in report.outcomes.values())
    tpot_s = max(each.tpot_s for each in report.outcomes.values())
    sliced = [plan for plan in plans if plan.slices]
    apart = [plan for plan in sliced if not any(span.draws for span in plan.spans)]
    layers = sum(each.hi - each.lo for plan in sliced for each in plan.slices)
    return layers * ROWS / LAYERS / report.ended_s, tpot_s, len(apart) / len(sliced)


@pytest.fixture(scope="module")
def costly() -> tuple[float, float, float]:
    return run(0.6e-3)


def test_learning_beside_answers_is_in_their_iterations_where_the_loop_costs_much(costly):
    tokens_s, tpot_s, apart = costly
    assert tpot_s <= TPOT
    assert apart < 0.1
    # What the objective less the margin leaves after the pass, all for one forward and backward.
    spare = 1.0 - (PASS_S + 4 * 2e-5 + 0.6e-3) / (TPOT / MARGIN)
    assert tokens_s > 0.9 * spare / (2e-5 + LAYERS * LAYER_S / ROWS)


def test_where_the_loop_costs_nothing_slices_that_give_way_run_apart(costly):
    tokens_s, tpot_s, apart = run(0.0)
    assert tpot_s <= TPOT and apart > 0.5
    assert tokens_s > costly[0]
