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
from tandem.scheduling.registry import known_policies

GUESS = Rates.guess(weight_bytes=1, num_parameters=1, num_layers=1)
CACHES = Caches(resume_s=0.004, decode_s=0.001, prompt_s=0.0005, cold_share=0.6)


def samples_of(caches: Caches, turns: int, **scheduling: object) -> Samples:
    """Of a device that is only computed, whose rates are exact and whose clock sleeps."""
    clock, samples = VirtualClock(), Samples()
    profile = replace(datasheet_profile("l4", "qwen2.5-0.5b"), caches=caches)
    loop, _ = build_simulation(resolve({"scheduling": scheduling}), profile, clock)
    probe = LoopProbe(loop, sleep=lambda seconds: clock.advance(seconds))
    for _ in range(turns):
        last_s = probe.turn(samples)
        assert last_s == samples.resumes[-1].seconds
        assert not loop.has_work
    loop.scheduler.cache.check()
    return samples


def test_streaks_are_of_one_number_of_decodes_and_end_in_warm_caches():
    samples = samples_of(CACHES, 30)
    assert {each.work.decodes for streak in samples.streaks for each in streak} == {1, 2, 4, 8}
    for streak in samples.streaks:
        assert len({each.work.decodes for each in streak}) == 1
        for earlier, later in pairwise(streak):
            assert later.seconds < earlier.seconds and later.before_s == earlier.seconds
    found = fit(samples, GUESS)
    assert found.caches.cold_share == pytest.approx(CACHES.cold_share, abs=0.02)


@pytest.mark.parametrize("policy", known_policies())
def test_answers_that_begin_one_after_the_other_are_no_streak_until_all_have(policy):
    """Passes are so small that prompts come in turns, beside decodes of those before."""
    samples = samples_of(CACHES, 30, policy=policy, max_batch_tokens=48)
    assert {streak[0].work.decodes for streak in samples.streaks} >= {1, 2, 4}
    for streak in samples.streaks:
        assert len({(each.work.decodes, each.work.rows) for each in streak}) == 1


def test_no_more_answers_are_decoded_than_run_at_once():
    samples = samples_of(CACHES, 20, max_sequences=2)
    assert {streak[0].work.decodes for streak in samples.streaks} == {1, 2}
    assert len(samples.streaks) == 20


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
    costs = Costs(iteration_s=0.1)
    loop = join_loop(resolve({}), FakeExecutor(clock=SleepingClock(), costs=costs))
    apply = loop.scheduler.apply

    def slowly(results, now):
        time.sleep(0.004)
        return apply(results, now)

    loop.scheduler.apply = slowly
    host_s, _ = probed(loop)
    assert 0.004 <= host_s < 0.09
    assert not loop.has_work
    loop.scheduler.cache.check()


@pytest.mark.parametrize(("blocks", "decoded"), [(1, False), (2, False), (60, True)])
def test_a_cache_of_a_few_tokens_gives_what_it_can(blocks, decoded):
    host_s, samples = probed(join_loop(resolve({}), FakeExecutor(num_blocks=blocks)))
    assert len(samples.resumes) == 3
    assert len(samples.warm_prompts) == len(samples.streaks), "no other prompt came after one"
    assert bool(samples.streaks) == (host_s > 0.0) == decoded
