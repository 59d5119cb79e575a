"""The study of RT-LM: subsets, arrivals, malicious tasks, and a small run of each kind of batch."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest

from benchmarks.rtlm import load
from benchmarks.rtlm.__main__ import Study
from benchmarks.rtlm.load import Task
from tandem.estimators.datasheet import load_profile
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import read_profile

PROFILE = Path("benchmarks/attainment/llama-60m-amx.profile.json")
TASKS = [
    Task(8, tokens, 400, tuple(factor * tokens for factor in (0.5, 0.8, 1.0, 1.2, 2.0)))
    for tokens in range(10, 210, 2)
]


def test_subsets_differ_in_the_variance_of_the_predictions():
    spread = [pstdev(t.expected for t in load.subset(TASKS, name)) for name in load.SUBSETS]
    assert spread == sorted(spread) and spread[0] < 0.5 * spread[2]
    assert all(len(load.subset(TASKS, name)) >= 50 for name in load.SUBSETS)


def test_arrivals_come_at_each_rate_for_a_minute():
    times = load.times(2.0, Random(0))
    assert times == sorted(times) and times[-1] < 2.0 * 60.0 * len(load.BETAS)
    assert len(times) == pytest.approx(sum(load.BETAS), rel=0.1)


def test_malicious_tasks_are_those_predicted_to_be_longest():
    drawn = load.with_malicious(TASKS, 0.3, 1000, Random(0))
    bad = [task.expected for task, malicious in drawn if malicious]
    good = [task.expected for task, malicious in drawn if not malicious]
    assert min(bad) > max(good) and len(bad) == pytest.approx(300, rel=0.2)


def test_coefficients_are_times_of_the_profile():
    latency = LatencyModel(read_profile(PROFILE).rates)
    batch = load.batch_of(latency, 100)
    phi, eta = load.coefficients(latency, TASKS, batch, 100)
    assert batch & (batch - 1) == 0 and eta > 0.0
    assert 8 * phi == pytest.approx(eta * fmean(task.output_tokens for task in TASKS), rel=0.1)


@pytest.mark.parametrize("policy", ["fifo", "hpf", "rt_lm", "unified"])
def test_a_run_serves_every_task(policy):
    study = Study(
        load_profile(str(PROFILE)), {"batch": "4"}, {"phi": "0.1", "eta": "0.01"}, 0.01, 0, 256
    )
    arrivals = study.load(TASKS)[:60]
    run = study.run("tables", "normal", policy, arrivals, static=policy != "unified")
    assert 0.0 < run.mean_s <= run.most_s and run.per_minute > 0.0
    shown = study.run("tables", "normal", policy, arrivals, static=policy != "unified")
    assert shown.mean_s == run.mean_s
