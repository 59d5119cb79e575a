"""Given the same times, the engine and the simulator decide alike, whatever the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from small_load import COSTS, IMPATIENT, config, load, small_profile

from fake_executor import FakeExecutor
from tandem.build import build_simulation, join_loop
from tandem.core.clock import VirtualClock
from tandem.core.events import PredictionError
from tandem.core.plan import DrawResult, LanePlan
from tandem.core.ports import Urgent, never
from tandem.scheduling.registry import known_policies
from tandem.sim.run import Simulation
from tandem.sim.timeline import Timeline

CROWD = [(0.02 * place + 0.00025, 3 + place % 9, 6 + place % 7) for place in range(80)]


@dataclass(frozen=True)
class Made:
    """The digest of a run's plans and when it had ended; what the memory estimator knows then."""

    plans: tuple[int, float]
    demand: tuple[float, PredictionError]


def made(
    policy: str,
    *,
    simulated: bool,
    options: dict[str, str] | None = None,
    shapes: list[tuple[float, int, int]] = CROWD,
    offline: range = range(0, 80, 4),
) -> Made:
    """By default a load of all classes that is more than can be served at once.

    Nobody comes when an iteration ends, to the last bit. The fake executor's answers are replaced
    by the simulator's: what two of them share is shared in the cache.
    """
    arrivals, trainers = load(shapes, steps=3, offline=offline)
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    profile = small_profile()
    settings = config(policy, policy_options=options or {})
    loop, simulator = build_simulation(settings, profile, clock, on_plan=timeline)
    if not simulated:
        executor = FakeExecutor(64, recording_tokens=64, clock=clock, costs=COSTS)
        submit, poll = executor.submit, executor.poll
        plans: list[LanePlan] = []

        def submit_and_keep(plan: LanePlan, urgent: Urgent = never) -> int:
            plans.append(plan)
            return submit(plan, urgent)

        def poll_and_show():
            results = []
            for plan, result in zip(plans, poll(), strict=True):
                timeline(plan, result)
                draws = [
                    DrawResult(draw.seq_id, simulator.token_of(draw.seq_id, draw.position))
                    for span in plan.spans
                    for draw in span.draws
                ]
                results.append(replace(result, draws=tuple(draws)))
            plans.clear()
            return results

        executor.submit, executor.poll = submit_and_keep, poll_and_show
        loop = join_loop(settings, executor, clock=clock, rates=profile.rates)
    Simulation(loop, clock, arrivals, trainers).run(until_s=600.0)
    held = loop.stats().prediction_errors["online_blocks"]
    plans = (timeline.digest, round(clock.now(), 6))
    return Made(plans, (loop.scheduler.demand.demand, held))


@pytest.mark.parametrize("policy", known_policies())
def test_engine_and_simulator_decide_alike_given_the_same_times(policy):
    """The fake executor knows the rules of a plan, the simulator's only its time."""
    for options in ({}, IMPATIENT.get(policy, {})):
        engine = made(policy, simulated=False, options=options)
        assert made(policy, simulated=True, options=options).plans == engine.plans


@pytest.mark.parametrize("policy", known_policies())
def test_engine_and_simulator_see_the_same_demand(policy):
    shapes = [(0.13 * place, 3 + place % 9, 2 + place % 7) for place in range(30)]
    runs = [
        made(policy, simulated=simulated, shapes=shapes, offline=range(0))
        for simulated in (True, False)
    ]
    assert runs[0] == runs[1]
    assert runs[0].demand[1].samples > 2


@pytest.mark.parametrize(
    ("policy", "option"),
    [(policy, option) for policy, options in IMPATIENT.items() for option in options],
)
def test_that_load_is_one_in_which_patience_ends(policy, option):
    """So that the engine and the simulator are compared in what comes then, too."""
    patient = {name: value for name, value in IMPATIENT[policy].items() if name != option}
    impatient = made(policy, simulated=True, options=IMPATIENT[policy])
    assert made(policy, simulated=True, options=patient).plans != impatient.plans
