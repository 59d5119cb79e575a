"""Under overload and in a rush: some requests are in time instead of nobody, and all end."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import fmean

import pytest
from small_load import load, run_one, small_profile

from tandem.core.plan import LanePlan
from tandem.sim.run import Arrival, SimReport

OVERLOAD = [(0.05 * place, 12, 16) for place in range(1000)]


def in_time(report, ttft_s: float) -> int:
    return sum(outcome.ttft_s <= ttft_s for outcome in report.outcomes.values())


@cache
def overloaded(policy: str) -> SimReport:
    arrivals, trainers = load(OVERLOAD, steps=1)
    return run_one(policy, arrivals, trainers, small_profile(256))[0]


@pytest.mark.full
def test_under_overload_some_are_in_time_instead_of_nobody():
    """A fifth more than can be served, for 50 s: most of what can be is in time, the others wait
    for longer, and the server is as busy."""
    first_come, by_turns = found = [overloaded(policy) for policy in ("fcfs", "unified")]
    for report in found:
        assert all(outcome.output_tokens == 16 for outcome in report.outcomes.values())
        assert sum(step.applied for step in report.steps) == 1
    assert in_time(first_come, 1.0) < 200 < 600 < in_time(by_turns, 1.0)
    assert by_turns.ended_s == pytest.approx(first_come.ended_s, rel=0.03)


def unlike(shapes: list[tuple[float, int, int]]) -> list[Arrival]:
    """Of which no prompt begins as another."""
    arrivals, _ = load(shapes)
    for place, each in enumerate(arrivals):
        prompt = (place % 50, place // 50, *each.work.prompt[2:])
        arrivals[place] = replace(each, work=replace(each.work, prompt=prompt))
    return arrivals


def rush(policy: str, requests: int) -> tuple[SimReport, list[LanePlan]]:
    """More than can be served within both objectives."""
    arrivals = unlike([(0.045 * place, 24, 12) for place in range(requests)])
    report, _, plans = run_one(
        policy, arrivals, (), small_profile(1024), max_sequences=64,
        max_batch_tokens=256, ttft_slo=0.6, tpot_slo=0.06,
    )  # fmt: skip
    return report, plans


def test_in_a_rush_answers_are_in_time_because_prompts_wait():
    """First come, first served makes nearly all answers late; all end, and hardly later."""
    found = []
    for policy in ("no_retrain", "unified"):
        report, _ = rush(policy, 600)
        assert all(outcome.finished for outcome in report.outcomes.values())
        met = [each.ttft_s <= 0.6 and each.tpot_s <= 0.06 for each in report.outcomes.values()]
        found.append((sum(met), report.ended_s))
    (first_come, first_come_s), (waiting, waiting_s) = found
    assert waiting > first_come + 200, found
    assert waiting_s < 1.2 * first_come_s, found


@pytest.mark.full
def test_an_objective_near_a_decode_alone_holds_nobody_up():
    """Of 20 ms however many there are, and 22.5: in what is left, a prompt of 100 would take a
    second. They come twice a second after a burst, of which the queue would never recover."""
    profile = small_profile(4096)
    forward = (profile.rates.forward[0], 1e-5, *profile.rates.forward[2:])  # decodes are for free
    profile = replace(
        profile,
        info=replace(profile.info, max_model_len=256),
        rates=replace(profile.rates, forward=forward),
    )
    times = [*[0.0] * 20, *[0.5 * place for place in range(60)]]
    arrivals = unlike([(at_s, 100, 100) for at_s in times])
    found = []
    for policy in ("no_retrain", "unified"):
        report, _, _ = run_one(
            policy, arrivals, (), profile, max_sequences=64, max_batch_tokens=256,
            ttft_slo=0.6, tpot_slo=0.0225,
        )  # fmt: skip
        found.append((report.ended_s, fmean(each.ttft_s for each in report.outcomes.values())))
    (first_come_s, first_come_ttft_s), (waiting_s, waiting_ttft_s) = found
    assert waiting_s < 1.05 * first_come_s and waiting_ttft_s < 1.2 * first_come_ttft_s, found


def test_no_request_starves_however_many_are_in_time():
    """One that is late starts after at most two TTFT objectives, the one that came first."""
    outcomes = sorted(
        overloaded("unified").outcomes.values(), key=lambda outcome: outcome.arrival_s
    )
    late = [outcome for outcome in outcomes if outcome.ttft_s > 1.0]
    assert len(late) > 20
    for before, after in pairwise(late):
        assert after.first_s <= before.first_s + 2 * 1.0 + 0.3
    assert [outcome.first_s for outcome in late] == sorted(outcome.first_s for outcome in late)
