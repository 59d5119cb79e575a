"""Leaps: runs of equal iterations are advanced at once, and nothing tells that they were."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_load import IMPATIENT, OFFLINE, SHAPES, VOCABULARY, config, load, small_profile

from tandem.bench.simulation import Training, arrivals_of
from tandem.bench.workload import PlannedRequest
from tandem.build import build_simulation
from tandem.core.clock import VirtualClock
from tandem.core.training import TrainingStep
from tandem.engine.loop import EngineLoop
from tandem.estimators.profile import Profile
from tandem.sim.run import Simulation

FEW = {"fifo": {"batch": "2", "static": "true"}, "rt_lm": {"batch": "3", "gather": "1.4"}}
"""Others have to wait."""


def run_both_ways(
    policy: str,
    profile: Profile,
    shapes: list[tuple[float, int, int]],
    steps_s: list[float],
    offline: Collection[int] = (),
    options: dict[str, str] | None = None,
    **scheduling: object,
) -> list[tuple[object, ...]]:
    """All that is known of a run without leaps, and of the same with them: times to the last bit,
    the estimators' own state, and what is left cached. Steps come at `steps_s`."""
    found: list[tuple[object, ...]] = []
    for leaping in (False, True):
        arrivals, trainers = load(shapes, len(steps_s), offline)
        times = iter(steps_s)
        arrivals = [
            replace(each, at_s=next(times)) if isinstance(each.work, TrainingStep) else each
            for each in arrivals
        ]
        clock = VirtualClock()
        loop, executor = build_simulation(
            config(policy, policy_options=options or {}, **scheduling),
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
        learned = [(step.step_id, step.started_s, step.finished_s) for step in report.steps]
        demand = (loop.scheduler.demand.demand, loop.scheduler.demand.errors.report())
        latency = loop.scheduler.latency
        speed = (latency.rates, latency.update_s())  # the latter at the present pace
        state = (clock.now(), speed, loop.scheduler.cache.counters, demand)
        found.append((seen, learned, report.iterations, *state, cached_depths(loop)))
    return found


def noisy(blocks: int) -> Profile:
    noise = (-0.2, -0.05, 0.1, 0.3)
    return small_profile(
        blocks, noise, 0.005, decode_s=0.008, prompt_s=0.003, cold_s=0.006, host_s=0.0013
    )


@settings(max_examples=40)
@given(
    shapes=SHAPES,
    steps_s=st.lists(st.floats(0.0, 6.0), max_size=4),
    offline=OFFLINE,
    blocks=st.integers(20, 80),
    ttft_slo=st.sampled_from([1.0, 0.1]),
)
@example([(0.0, 16, 9), (0.0, 16, 9), (0.0, 29, 5)], [], set(), 20, 1.0)  # one does not fit
@pytest.mark.parametrize("policy", ["adainf", "fcfs", "fifo", "no_retrain", "rt_lm", "unified"])
def test_leaps_give_what_single_iterations_give(policy, shapes, steps_s, offline, blocks, ttft_slo):
    profile = noisy(blocks)
    options = (IMPATIENT | FEW).get(policy, {})
    single, leaping = run_both_ways(
        policy, profile, shapes, steps_s, offline, options, ttft_slo=ttft_slo
    )
    assert single == leaping


def test_learning_that_comes_with_a_request_is_considered_as_often_after_a_leap():
    """Time without learning is no time in which it had no place."""
    profile = noisy(20)
    shapes = [(4.25, 1, 1), (4.1875, 1, 6)]
    single, leaping = run_both_ways(
        "unified", profile, shapes, [4.25], options=IMPATIENT["unified"], ttft_slo=0.1
    )
    assert single == leaping


def test_learning_that_comes_in_a_leap_runs_when_it_would_have():
    """The first step ends alone, between two tokens of an answer that then leaps."""
    shapes = [(0.0, 4, 60)]
    single, leaping = run_both_ways("unified", small_profile(), shapes, [0.3, 0.9])
    assert single == leaping


def test_offline_requests_earn_nothing_in_a_leap():
    """Nobody else wanted the time until an online request came in the midst of it, which leaves
    none for the prompt that came with it."""
    shapes = [(0.0, 4, 60), (1.0, 20, 8), (1.0, 30, 8)]
    single, leaping = run_both_ways(
        "unified",
        small_profile(),
        shapes,
        [],
        offline=[0, 1],
        options={"min_share": "0.5"},
        ttft_slo=0.1,
    )
    assert single == leaping


def cached_depths(loop: EngineLoop) -> list[tuple[int, int]]:
    """Depth and age rank of every cached block: what an eviction in another order would change. An
    attempt to admit a request counts as a look, so the ages themselves are larger without leaps."""
    blocks = list(loop.scheduler.cache.idle_blocks())
    ranks = {age: rank for rank, age in enumerate(sorted({b.last_access for b in blocks}))}
    return sorted((b.depth, ranks[b.last_access]) for b in blocks)


def leaped(shapes, num_blocks: int = 64, policy: str = "unified", **scheduling: object):
    """A run with leaps: its report, the plans that were executed one by one, and the loop."""
    planned = [
        PlannedRequest(n, at_s, tuple(range(n, n + prompt)), output)
        for n, (at_s, prompt, output) in enumerate(shapes)
    ]
    arrivals, _ = arrivals_of(planned, Training(), VOCABULARY, 0)
    clock = VirtualClock()
    loop, executor = build_simulation(
        config(policy, **scheduling), small_profile(num_blocks), clock
    )
    submitted = []
    submit = executor.submit
    executor.submit = lambda plan, urgent: (submitted.append(plan), submit(plan, urgent))[1]
    return Simulation(loop, clock, arrivals, leaps=executor).run(), submitted, loop


def test_a_leap_is_taken_at_all():
    report, submitted, _ = leaped([(0.0, 10, 12), (0.0, 10, 9)])
    assert report.iterations == 12 and len(submitted) < 6


def test_a_leap_is_taken_although_requests_wait():
    shapes = [(0.0, 10, 12), (0.0, 10, 9), (0.0, 10, 12)]
    report, submitted, _ = leaped(shapes, policy="fifo", policy_options={"batch": "1"})
    assert report.iterations == 33 and len(submitted) < 14


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
