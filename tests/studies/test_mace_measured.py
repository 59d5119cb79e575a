"""What a machine bears is found by what work takes there; simulated machines are told exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.mace.engines import engines_over, make_engine
from benchmarks.mace.measured import FULL_RATE, SMALL, Capacity, bearable, measure_capacity
from benchmarks.mace.runs import VARIANTS, Load
from tandem.estimators.datasheet import load_profile
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import PassWork

PROFILE = load_profile("agx-orin:llama-3.2-3b")
CAPACITY = Capacity(ttft_s=0.03, forward_s=0.02, tpot_s=0.01, request_s=0.1, job_s=0.8)


def test_a_simulated_machine_takes_what_its_profile_says():
    found = measure_capacity(SMALL, PROFILE, make_engine)
    assert found.ttft_s == pytest.approx(found.forward_s)
    alone = PassWork()
    alone.decode(SMALL.prompt_tokens)
    assert found.tpot_s == pytest.approx(LatencyModel(PROFILE.rates).forward_s(alone), rel=0.02)
    assert found.request_s < found.ttft_s + SMALL.output_tokens * found.tpot_s
    assert found.job_s > found.forward_s


def test_longer_jobs_and_requests_take_longer():
    short = measure_capacity(SMALL, PROFILE, make_engine)
    long = measure_capacity(replace(SMALL, pair_tokens=640, output_tokens=64), PROFILE, make_engine)
    assert long.job_s > 2.0 * short.job_s and long.request_s > 1.5 * short.request_s


def test_what_is_borne_is_all_of_the_time_at_the_highest_rate():
    assert CAPACITY.rate(0.0) == pytest.approx(10.0)
    assert CAPACITY.rate(FULL_RATE) == pytest.approx(1.0 / (0.1 + 0.5 * 0.8))
    assert bearable(SMALL, CAPACITY) == replace(SMALL, rate=2.0)


def test_a_load_that_is_borne_keeps_the_machine_busy_and_little_longer_than_it_comes():
    scale = replace(SMALL, duration_s=60.0)
    scale = bearable(scale, measure_capacity(scale, PROFILE, make_engine))
    adainf = next(variant for variant in VARIANTS if variant.name == "adainf")
    engine = make_engine(adainf, PROFILE)
    report, _ = Load(scale, PROFILE, FULL_RATE).meet(engine)
    busy_s = sum(moment.seconds for moment in engine.timeline.moments)
    assert 0.8 * scale.duration_s < busy_s and report.ended_s < 1.5 * scale.duration_s


class Ended(Exception):
    """A loop was made."""


@pytest.mark.parametrize("name", ["ekya", "unified"])
def test_engines_share_the_executor_and_ekya_is_told_its_window(monkeypatch, name):
    told = []

    def join_loop(settings, executor, **_):
        told.append((settings.scheduling, executor))
        raise Ended

    monkeypatch.setattr("benchmarks.mace.engines.join_loop", join_loop)
    executor = object()
    variant = next(variant for variant in VARIANTS if variant.name == name)
    with pytest.raises(Ended):
        engines_over(executor, window_s=1.5)(variant, PROFILE)
    ((scheduling, given),) = told
    assert given is executor
    assert scheduling.policy_options == ({"interval_s": "1.5"} if name == "ekya" else {})
