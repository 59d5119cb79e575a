"""What passes take in an engine's loop: streaks of decodes, prompts after them, time beside."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from fake_executor import Costs, FakeExecutor
from tandem.build import build_simulation, join_loop
from tandem.config import resolve
from tandem.core.clock import SleepingClock, VirtualClock
from tandem.engine.loop import EngineLoop
from tandem.engine.probe import LoopProbe
from tandem.estimators.calibrate import Samples, fit
from tandem.estimators.datasheet import datasheet_profile
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Caches

GUESS = Rates.guess(weight_bytes=1, num_parameters=1, num_layers=1)
CACHES = Caches(resume_s=0.004, decode_s=0.001, prompt_s=0.0005, cold_share=0.6)


def samples_of(caches: Caches, turns: int) -> Samples:
    """Of a device that is only computed, whose rates are exact and whose clock sleeps."""
    clock, samples = VirtualClock(), Samples()
    profile = replace(datasheet_profile("l4", "qwen2.5-0.5b"), caches=caches)
    loop, _ = build_simulation(resolve({}), profile, clock)
    probe = LoopProbe(loop, sleep=lambda seconds: clock.advance(seconds))
    for _ in range(turns):
        last_s = probe.turn(samples)
        assert last_s == samples.resumes[-1].seconds
        assert not loop.has_work
    loop.scheduler.cache.check()
    return samples


def test_streaks_are_of_decodes_alone_and_end_in_warm_caches():
    samples = samples_of(CACHES, 30)
    assert {each.work.decodes for streak in samples.streaks for each in streak} == {1, 2, 4, 8}
    for streak in samples.streaks:
        assert len(streak) == 10 and not any(each.work.rows for each in streak)
        for earlier, later in pairwise(streak):
            assert later.seconds < earlier.seconds and later.before_s == earlier.seconds
    found = fit(samples, GUESS)
    assert found.caches.cold_share == pytest.approx(CACHES.cold_share, abs=0.02)


def test_a_prompt_comes_right_after_a_streak_and_another_after_a_sleep():
    warm, plain = samples_of(CACHES, 20), samples_of(Caches(), 20)
    assert len(warm.warm_prompts) == len(warm.resumes) == 20
    for after, resumed in zip(warm.warm_prompts, warm.resumes, strict=True):
        assert after.work.rows == resumed.work.rows > 0 and not after.work.decodes
        assert math.isfinite(after.before_s) and resumed.before_s == math.inf
    for name, change_s in (("warm_prompts", -0.0005), ("resumes", 0.004)):
        pairs = zip(getattr(warm, name), getattr(plain, name), strict=True)
        for with_caches, without in pairs:
            assert with_caches.work == without.work
            gained_s = with_caches.seconds - without.seconds
            assert gained_s == pytest.approx(change_s, rel=0.05)


def probed(loop: EngineLoop) -> tuple[float, Samples]:
    probe, samples = LoopProbe(loop, sleep=lambda seconds: None), Samples()
    for _ in range(3):
        probe.turn(samples)
    return probe.host_s, samples


def test_what_an_iteration_takes_beside_its_work_is_measured():
    costs = Costs(iteration_s=0.03)
    loop = join_loop(resolve({}), FakeExecutor(clock=SleepingClock(), costs=costs))
    apply = loop.scheduler.apply

    def slowly(results, now):
        time.sleep(0.004)
        return apply(results, now)

    loop.scheduler.apply = slowly
    host_s, _ = probed(loop)
    assert 0.004 <= host_s < 0.02
    assert not loop.has_work
    loop.scheduler.cache.check()


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_a_cache_of_a_few_tokens_gives_what_it_can(blocks):
    _, samples = probed(join_loop(resolve({}), FakeExecutor(num_blocks=blocks)))
    assert len(samples.warm_prompts) == len(samples.resumes) == 3
    assert all(len(streak) == 10 for streak in samples.streaks)


def test_samples_of_two_times_are_one_profile():
    first, second = samples_of(CACHES, 3), samples_of(CACHES, 4)
    first.extend(second)
    assert len(first.streaks) == len(first.resumes) == 7
    assert first.streaks[3:] == second.streaks
