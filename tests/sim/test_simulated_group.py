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
from tandem.engine.placement import Above, Overflow, Placement
from tandem.estimators.batching import Batching
from tandem.estimators.profile import Profile, on_share
from tandem.sim.group import divide, together
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


def engine(profile: Profile, max_sequences: int = 1) -> Simulation:
    clock = VirtualClock()
    loop, executor = build_simulation(config("fcfs", max_sequences=max_sequences), profile, clock)
    return Simulation(loop, clock, [], leaps=executor)


def run(profile: Profile, arrivals: list[Arrival]) -> SimReport:
    alone = engine(profile)
    divide(arrivals, Overflow(), [alone])
    return alone.run()


def run_both(
    arrivals: list[Arrival], placement: Placement, **places: int
) -> tuple[SimReport, SimReport]:
    """On a device, and on one of half the speed beside it."""
    engines = [engine(small_profile()), engine(on_share(small_profile(), 0.5), **places)]
    divide(arrivals, placement, engines)
    main, other = (each.run() for each in engines)
    return main, other


def test_every_request_belongs_to_one_engine_and_training_to_the_main_one():
    arrivals, trainers = load(SHAPES, steps=3)
    clock = VirtualClock()
    loop, executor = build_simulation(config("fcfs", max_sequences=1), small_profile(), clock)
    engines = [Simulation(loop, clock, [], trainers, leaps=executor), engine(small_profile())]
    divide(forecast(arrivals), Overflow(), engines)
    main, other = (each.run() for each in engines)
    assert not main.outcomes.keys() & other.outcomes.keys()
    assert len(main.outcomes) + len(other.outcomes) == len(SHAPES)
    assert other.outcomes.keys() <= {f"request-{place}" for place in range(39, 120, 10)}, (
        "long ones, once 32 predictions are known"
    )
    assert other.outcomes and len(main.steps) == 3


def test_a_placement_may_know_more_than_the_engines():
    arrivals, _ = load(SHAPES)
    known = {each.work.request_id: each.work for each in forecast(arrivals)}
    for knows, moved in ((lambda each: each, False), (lambda each: known[each.request_id], True)):
        engines = [engine(small_profile()) for _ in range(2)]
        divide(arrivals, Overflow(), engines, knows)
        assert bool(engines[1].run().outcomes) == moved


def test_another_engine_gets_nothing_while_its_places_are_held():
    """As in a server, whatever the placement wants: the first answers hold them until the last
    request comes."""
    arrivals, _ = load([(0.0, 4, 30), (0.1, 4, 30), (0.2, 4, 4), (0.3, 4, 4), (9.0, 4, 4)])
    for places, moved in ((1, [0, 4]), (2, [0, 1, 4])):
        main, other = run_both(forecast(arrivals), Above(0.0), max_sequences=places)
        assert [*other.outcomes] == [f"request-{place}" for place in moved]
        assert len(main.outcomes) == 5 - len(moved)


def test_a_request_that_comes_before_the_first_token_of_the_last_one_stays():
    """A first token takes 48 ms there. Both engines have room for more."""
    for at_s, moved in ((0.04, 1), (0.06, 2)):
        arrivals, _ = load([(0.0, 4, 30), (at_s, 4, 30)])
        _, other = run_both(forecast(arrivals), Above(0.0), max_sequences=4)
        assert len(other.outcomes) == moved


def test_choices_hold_a_place_each_until_they_end():
    request = load([(0.0, 4, 10)])[0][0].work
    alone = engine(small_profile(), max_sequences=4)
    alone.arrive(Arrival(0.0, replace(request, n=3)))
    two = replace(request, request_id="next", n=2)
    assert not alone.can_take(two, 0.1) and alone.can_take(replace(two, n=1), 0.1)
    assert alone.can_take(two, 5.0)
    assert alone.run().outcomes["request-0"].output_tokens == 30


def test_an_answer_holds_its_place_until_the_time_at_which_it_ends():
    """The clock is at the end of the iteration already when the engine is asked."""
    arrivals, _ = load([(0.0, 4, 10)])
    whole = run(small_profile(), arrivals).outcomes["request-0"]
    request = replace(arrivals[0].work, request_id="next")
    for at_s, free in ((whole.last_s - 0.005, False), (whole.last_s + 0.005, True)):
        alone = engine(small_profile())
        alone.arrive(arrivals[0])
        assert alone.can_take(request, at_s) == free


def test_what_does_not_fit_another_engine_stays():
    arrivals, _ = load([(0.0, 4, 50), (1.0, 4, 20)])
    engines = [engine(small_profile()), engine(small_profile(num_blocks=8))]
    divide(forecast(arrivals), Above(0.0), engines)
    main, other = (each.run() for each in engines)
    assert [*main.outcomes, *other.outcomes] == ["request-0", "request-1"]
    assert all(each.finished for each in together(main, other).outcomes.values())


@pytest.mark.parametrize("policy", ["fcfs", "unified", "rt_lm"])
def test_to_ask_an_engine_whether_it_can_take_a_request_does_not_change_its_times(policy):
    """Static batches of gathered requests with `rt_lm`."""
    arrivals, _ = load([(0.05 * place, 4, 5 + place % 30) for place in range(80)])
    profile = small_profile(noise=(0.8, 1.0, 1.3), host_s=0.001)
    options = {"policy_options": {"static": "true"}} if policy == "rt_lm" else {}

    def made() -> Simulation:
        clock = VirtualClock()
        settings = config(policy, max_sequences=4, **options)
        loop, executor = build_simulation(settings, profile, clock)
        return Simulation(loop, clock, [], leaps=executor)

    asked, alone = made(), made()
    divide(forecast(arrivals), Above(0.0), [engine(small_profile()), asked])
    other = asked.run()
    for arrival in forecast(arrivals):
        if arrival.work.request_id in other.outcomes:
            alone.arrive(arrival)
    assert len(other.outcomes) > 5
    assert alone.run().outcomes == other.outcomes


def test_short_answers_no_longer_wait_for_long_ones():
    """RT-LM's offloading, beside a device of half the speed."""
    arrivals, _ = load(SHAPES)
    arrivals = forecast(arrivals)
    alone = run(small_profile(), arrivals)
    main, other = run_both(arrivals, Overflow())
    both = together(main, other)
    assert list(both.outcomes) == list(alone.outcomes), "in order of arrival"
    assert all(outcome.finished for outcome in both.outcomes.values())
    assert both.ended_s >= max(each.last_s for each in both.outcomes.values())

    def response_s(report: SimReport) -> float:
        short = [each for name, each in report.outcomes.items() if name in main.outcomes]
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
