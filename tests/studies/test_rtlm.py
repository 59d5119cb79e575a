"""The study of RT-LM: subsets, malicious tasks, runs of each kind of batch, bars and the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import pstdev

import pytest

from benchmarks.rtlm import load, study
from benchmarks.rtlm.bars import Runs, bars, compared
from benchmarks.rtlm.report import page
from benchmarks.rtlm.runs import Beside, Case, Device, Engine, Run
from tandem.bench.answers import Answer, arrival
from tandem.config import resolve
from tandem.core.request import Request
from tandem.engine.placement import Above, Overflow, Placement, uncertainty_of
from tandem.estimators.batching import fit_batching
from tandem.estimators.profile import on_share, read_profile
from tandem.sim.group import divide
from tandem.sim.run import Arrival

PROFILE = read_profile(Path("benchmarks/attainment/llama-60m-amx.profile.json"))
TASKS = [
    Answer(8, tokens, 400, tuple(factor * tokens for factor in (0.5, 0.8, 1.0, 1.2, 2.0)))
    for tokens in range(10, 210, 2)
]
LENGTHS = [(task.input_tokens, task.output_tokens) for task in TASKS]
BATCHING = fit_batching(PROFILE.rates, PROFILE.host_s, LENGTHS)
DEVICE = Device(replace(PROFILE, batching=BATCHING), BATCHING, 256)


def test_subsets_differ_in_the_variance_of_the_predictions():
    spread = [pstdev(t.expected for t in load.subset(TASKS, name)) for name in load.SUBSETS]
    assert spread == sorted(spread) and spread[0] < 0.5 * spread[2]
    assert all(len(load.subset(TASKS, name)) >= 50 for name in load.SUBSETS)


def test_malicious_tasks_are_those_predicted_to_be_longest():
    drawn = load.with_malicious(TASKS, 0.3, 1000, Random(0))
    bad = [task.expected for task, malicious in drawn if malicious]
    good = [task.expected for task, malicious in drawn if not malicious]
    assert min(bad) > max(good) and len(bad) == pytest.approx(300, rel=0.2)


def test_tau_lets_exactly_the_malicious_tasks_go_to_the_overflow_engine():
    """Equation 4 over all tasks; the one at tau itself stays."""
    tau = load.tau_of(TASKS)
    benign, crafted = load.apart(TASKS)
    above = [task for task in TASKS if _u(task) > tau]
    assert not set(above) & set(benign)
    assert len(crafted) - len(above) <= 1


def _u(task: Answer) -> float:
    work = arrival(task, 0, 0.0).work
    assert isinstance(work, Request) and work.length is not None
    return uncertainty_of(work.length)


def placed(arrivals: list[Arrival], placement: Placement, share: float = 0.25) -> list[list[str]]:
    """Names of the tasks of the main engine, and of the one beside it."""
    settings = resolve({"scheduling": {"policy": "rt_lm", "max_batch_tokens": 256}}, environ={})
    engines = [
        Engine(settings, on_share(DEVICE.profile, each), timed=False).simulation
        for each in (1.0 - share, share)
    ]
    divide(arrivals, placement, engines)
    return [list(each.run().outcomes) for each in engines]


def test_an_overflow_engine_beside_the_main_one_serves_what_it_gets():
    """The same as two devices of a quarter and three quarters, each with its part of the tasks."""
    arrivals = DEVICE.load(TASKS, 0.5, 0)[:80]
    case = Case("malicious", "0%", 0.5, 0, "rt_lm", False)
    above = Above(load.tau_of(TASKS))
    both = DEVICE.run(case, arrivals, "rt_lm", {}, beside=Beside(above, 0.25))
    parts = placed(arrivals, above)
    assert all(parts)
    apart = {}
    for share, part in zip((0.75, 0.25), parts, strict=True):
        engine = replace(DEVICE, profile=on_share(DEVICE.profile, share))
        own = [each for each in arrivals if each.work.request_id in part]
        apart |= engine.run(case, own, "rt_lm", {}).response_s
    assert both.response_s == apart and len(apart) == 80
    few = both.only({"task-0", "task-1"})
    assert few.response_s == {name: apart[name] for name in ("task-0", "task-1")}
    assert few.per_minute == pytest.approx(both.per_minute / 40)


def test_a_fixed_tau_keeps_more_of_an_attack_from_the_main_engine_than_a_recent_one():
    at_s = DEVICE.times(load.apart(TASKS)[0], 0.1, Random(0))[:400]
    chosen = load.with_malicious(TASKS, 0.5, len(at_s), Random(0))
    arrivals = [arrival(task, n, at_s[n]) for n, (task, _) in enumerate(chosen)]
    malicious = sum(bad for _, bad in chosen)
    _, fixed = placed(arrivals, Above(load.tau_of(TASKS)), 0.5)
    _, recent = placed(arrivals, Overflow(load.MALICIOUS), 0.5)
    assert len(recent) < 0.3 * malicious < 0.5 * malicious < len(fixed)


def test_more_malicious_tasks_replace_benign_ones_and_leave_the_others():
    few, many = (load.with_malicious(TASKS, share, 500, Random(0)) for share in (0.2, 0.6))
    for (task, bad), (other, worse) in zip(few, many, strict=True):
        assert worse or not bad
        assert bad != worse or task is other


@pytest.mark.parametrize("policy", ["fifo", "hpf", "rt_lm", "unified"])
def test_a_run_serves_every_task(policy):
    arrivals = DEVICE.load(TASKS, 0.5, 0)[:60]
    case = Case("tables", "normal", 0.5, 0, policy, policy != "unified")
    run = DEVICE.run(case, arrivals, policy, {})
    assert 0.0 < run.mean_s <= run.most_s and run.per_minute > 0.0
    assert len(run.response_s) == 60
    timed = DEVICE.run(case, arrivals, policy, {}, timed=True)
    assert timed.response_s == pytest.approx(run.response_s)
    assert timed.schedule_s > 0.0 == run.schedule_s


def test_a_comparison_is_of_the_tasks_that_both_have():
    case = Case("malicious", "0%", 0.3, 0, "rt_lm", True)
    calm = Run(case, {"task-0": 1.0, "task-1": 2.0, "task-2": 90.0}, 1.0)
    attacked = Run(replace(case, tasks="50%"), {"task-0": 1.5, "task-1": 3.0}, 1.0)
    assert compared([attacked], [calm]).value == pytest.approx(1.5)


def runs_of(seconds: dict[tuple[str, bool], float]) -> Runs:
    """Every part, with these response times by policy and kind of batches."""

    def run(part: str, tasks: str, policy: str, static: bool, factor: float = 1.0) -> Run:
        taken = {f"task-{place}": factor * seconds[policy, static] for place in range(4)}
        return Run(Case(part, tasks, 0.5, 0, policy, static), taken, 10.0, 0.001, 40.0)

    def under_attack(share: float, policy: str, static: bool) -> Run:
        rise = share if policy == "fifo" else 0.2 * share
        return run("malicious", f"{share:.0%}", policy, static, 1.0 + rise)

    made = [
        run(part, tasks, *kind)
        for part, names in (("tables", load.SUBSETS), ("overhead", ("normal",)))
        for tasks in names
        for kind in seconds
    ]
    made += [under_attack(share, *kind) for share in (0.0, 0.2, 0.5, 0.9) for kind in seconds]
    for label, _, _ in study.ABLATION:
        for static in (True, False):
            made.append(replace(made[0], case=Case("ablation", "large", 0.5, 0, label, static)))
    made.append(replace(made[0], case=Case("parameters", "alpha", 0.5, 0, "1", True)))
    return Runs(made)


KINDS = (True, False)
SECONDS = {(name, static): 4.0 for name in ("fifo", "hpf", "luf", "muf") for static in KINDS}
SECONDS |= {(study.PERFECT, static): 1.0 for static in KINDS}
SECONDS |= {("rt_lm", True): 2.0, ("rt_lm", False): 2.0, ("unified", False): 1.0}
SECONDS |= {
    (policy + engines, static): 0.9 * SECONDS[policy, static]
    for policy, static, engines in study.attacked()
    if engines
}


def test_bars_are_met_by_what_they_ask_for():
    found = list(bars(runs_of(SECONDS), 0.001))
    missed = [bar.claim for bar in found if not bar.met]
    assert len(found) == 30 and len(missed) == 4
    assert all("40% more tasks" in claim for claim in missed)
    slow = SECONDS | {("unified", False): 2.1, ("rt_lm", True): 3.0}
    missed = [bar.claim for bar in bars(runs_of(slow), 2.0) if not bar.met]
    about = [claim.partition(",")[0].partition("'")[0] for claim in missed]
    each = [*3 * ["static batches"], *2 * ["continuous batches"]]
    assert about == [*each, "unified", "rt_lm", "rt_lm", "unified"]


def test_the_page_has_every_policy_and_every_part():
    runs = runs_of(SECONDS)
    text = page("Head.", list(bars(runs, 0.001)), runs, [("rtlm-x-response", "Figure 9")])
    assert "| rt_lm | 2.0 | 2.0 | 10.0 | -50% [-50%, -50%] |" in text
    assert "| fifo, static | 4.00 | 4.80 | 6.00 | 7.60 |" in text
    assert "**not met**" in text and "![Figure 9](rtlm-x-response.png)" in text
