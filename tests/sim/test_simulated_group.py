"""Several engines in the simulator: who gets which load, and what comes out of both."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
from small_load import config, load, small_profile

from tandem.build import build_simulation
from tandem.core.clock import VirtualClock
from tandem.core.lengths import Forecast
from tandem.core.training import TrainingStep
from tandem.engine.placement import Overflow
from tandem.estimators.batching import Batching
from tandem.estimators.profile import Profile, on_share
from tandem.sim.group import divided, together
from tandem.sim.run import Arrival, SimReport, Simulation

# Every tenth answer is ten times as long as the others.
SHAPES = [(0.1 * place, 4, 40 if place % 10 == 9 else 4) for place in range(120)]


def forecast(arrivals: list[Arrival]) -> list[Arrival]:
    """With forecasts that come true."""

    def known(arrival: Arrival) -> Arrival:
        if isinstance(arrival.work, TrainingStep):
            return arrival
        tokens = arrival.work.sampling.max_tokens
        length = Forecast((float(tokens),) * 5, tokens, "test")
        return replace(arrival, work=replace(arrival.work, length=length))

    return [known(arrival) for arrival in arrivals]


def run(profile: Profile, arrivals: list[Arrival], policy: str = "fcfs") -> SimReport:
    clock = VirtualClock()
    loop, executor = build_simulation(config(policy, max_sequences=1), profile, clock)
    return Simulation(loop, clock, arrivals, leaps=executor).run()


def names(arrivals: list[Arrival]) -> set[str]:
    return {each.work.request_id for each in arrivals if not isinstance(each.work, TrainingStep)}


def test_every_request_belongs_to_one_engine_and_training_to_the_main_one():
    arrivals, _ = load(SHAPES, steps=3)
    arrivals = forecast(arrivals)
    main, other = divided(arrivals, Overflow(), 2)
    assert not names(main) & names(other)
    assert names(main) | names(other) == names(arrivals)
    assert {place for place in range(120) if f"request-{place}" in names(other)} == set(
        range(39, 120, 10)
    ), "the long ones, once 32 predictions are known"
    steps = [each for each in main if isinstance(each.work, TrainingStep)]
    assert len(steps) == 3 and len(main) + len(other) == len(arrivals)


def test_a_placement_may_know_more_than_the_engines():
    arrivals, _ = load(SHAPES)
    assert not divided(arrivals, Overflow(), 2)[1], "nothing is predicted"
    known = {each.work.request_id: each.work for each in forecast(arrivals)}
    _, other = divided(arrivals, Overflow(), 2, lambda request: known[request.request_id])
    assert other and all(each.work.length is None for each in other)


def test_short_answers_no_longer_wait_for_long_ones():
    """RT-LM's offloading, beside a device of half the speed."""
    arrivals, _ = load(SHAPES)
    arrivals = forecast(arrivals)
    main, other = divided(arrivals, Overflow(), 2)
    alone = run(small_profile(), arrivals)
    both = together(run(small_profile(), main), run(on_share(small_profile(), 0.5), other))
    assert list(both.outcomes) == list(alone.outcomes), "in order of arrival"
    assert all(outcome.finished for outcome in both.outcomes.values())
    assert both.ended_s >= max(each.last_s for each in both.outcomes.values())

    def response_s(report: SimReport) -> float:
        short = [each for name, each in report.outcomes.items() if name in names(main)]
        return fmean(each.last_s - each.arrival_s for each in short)

    assert response_s(both) < 0.8 * response_s(alone)


def test_on_a_share_of_the_device_constants_of_batches_take_longer_as_the_work_does():
    whole = replace(small_profile(), batching=Batching(0.1, 0.02, 8, alpha=1.2))
    assert on_share(whole, 0.25).batching == Batching(0.4, 0.08, 8, alpha=1.2)
    assert on_share(small_profile(), 0.25).batching is None


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_on_a_share_of_the_device_all_work_takes_longer(share):
    arrivals, _ = load([(0.0, 8, 5)])
    whole = run(small_profile(), arrivals).outcomes["request-0"]
    part = run(on_share(small_profile(), share), arrivals).outcomes["request-0"]
    assert part.last_s == pytest.approx(whole.last_s / share, rel=1e-6)
