"""Leaps: runs of equal iterations are advanced at once, and nothing tells that they were."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_load import IMPATIENT, OFFLINE, SHAPES, VOCABULARY, config, load, small_profile

from tandem.bench.simulation import Training, arrivals_of
from tandem.bench.workload import PlannedRequest
from tandem.build import build_simulation
from tandem.core.clock import VirtualClock
from tandem.engine.loop import EngineLoop
from tandem.sim.run import Simulation


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, steps=st.integers(0, 2), offline=OFFLINE, blocks=st.integers(20, 80))
@pytest.mark.parametrize("policy", ["adainf", "fcfs", "no_retrain", "unified"])
def test_leaps_give_what_single_iterations_give(policy, shapes, steps, offline, blocks):
    """Times to the last bit, with noise, the estimators' own state, and what is left cached."""
    profile = small_profile(blocks, noise=(-0.2, -0.05, 0.1, 0.3), resume_s=0.005)
    found = []
    for leaping in (False, True):
        arrivals, trainers = load(shapes, steps, offline)
        clock = VirtualClock()
        loop, executor = build_simulation(
            config(policy, policy_options=IMPATIENT.get(policy, {})),
            profile,
            clock,
            seed=1,
            check_every_step=True,
        )
        leaps = executor if leaping else None
        report = Simulation(loop, clock, arrivals, trainers, leaps=leaps).run(until_s=60.0)
        loop.scheduler.cache.check()
        seen = [
            (o.first_s, o.last_s, o.output_tokens, o.cached_tokens)
            for o in report.outcomes.values()
        ]
        demand = (loop.scheduler.demand.demand, loop.scheduler.demand.errors.report())
        state = (clock.now(), loop.scheduler.latency.rates, loop.scheduler.cache.counters, demand)
        found.append((seen, report.iterations, *state, cached_depths(loop)))
    assert found[0] == found[1]


def cached_depths(loop: EngineLoop) -> list[tuple[int, int]]:
    """Depth and age rank of every cached block: what an eviction in another order would change."""
    return sorted((b.depth, b.last_access) for b in loop.scheduler.cache.idle_blocks())


def leaped(shapes, num_blocks: int = 64):
    """A run with leaps: its report, the plans that were executed one by one, and the loop."""
    planned = [
        PlannedRequest(n, at_s, tuple(range(n, n + prompt)), output)
        for n, (at_s, prompt, output) in enumerate(shapes)
    ]
    arrivals, _ = arrivals_of(planned, Training(), VOCABULARY, 0)
    clock = VirtualClock()
    loop, executor = build_simulation(config("unified"), small_profile(num_blocks), clock)
    submitted = []
    submit = executor.submit
    executor.submit = lambda plan, urgent: (submitted.append(plan), submit(plan, urgent))[1]
    return Simulation(loop, clock, arrivals, leaps=executor).run(), submitted, loop


def test_a_leap_is_taken_at_all():
    report, submitted, _ = leaped([(0.0, 10, 12), (0.0, 10, 9)])
    assert report.iterations == 12 and len(submitted) < 6


def test_a_leap_of_seconds_samples_what_is_held_each_second():
    """50 tokens of 21 ms, 4 a block: of the prompt, and when the 48th token is computed."""
    _, submitted, loop = leaped([(0.0, 10, 50)])
    assert len(submitted) < 6
    first, second = -(-10 // 4), -(-(10 + 48) // 4)
    mean, deviation = (first + second) / 2, (second - first) / 2
    assert loop.scheduler.demand.demand == pytest.approx(mean + 2 * deviation)
    assert loop.scheduler.demand.errors.report().bias == (first - second) / second


def test_a_full_cache_does_not_stop_leaps():
    shapes = [(3.0 * (place // 2), 10, 30) for place in range(8)]
    report, submitted, loop = leaped(shapes, num_blocks=24)
    assert loop.scheduler.cache.counters.evictions_blocks > 20
    assert report.iterations > 4 * 29 and len(submitted) < report.iterations / 4


def test_a_first_token_is_no_part_of_a_leap():
    """The last token of a prompt that the iteration before had no row for."""
    shapes = [(0.0, 3, 1), (0.0, 30, 3)]
    report, _, _ = leaped(shapes)
    outcome = report.outcomes["request-1"]
    assert outcome.tpot_s == pytest.approx(0.021, abs=1e-6)
