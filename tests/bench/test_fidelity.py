"""Simulator against engine: equal loads, an account that adds up, a verdict that can say no."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tandem.bench.fidelity import Account, Figures, Steps, agree, compare, run_once
from tandem.bench.lengths import parse_lengths
from tandem.bench.options import Arrivals, WorkloadOptions
from tandem.bench.simulation import Training, arrivals_of
from tandem.bench.workload import Limits, PlannedRequest
from tandem.build import build_simulation
from tandem.cli import app
from tandem.cli.fidelity import FidelityOptions, _real
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.plan import LanePlan, StepResult
from tandem.estimators.batching import Batching
from tandem.estimators.datasheet import datasheet_profile
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import Profile
from tandem.estimators.terms import FORWARD_TERMS
from tandem.scheduling.bounded_batch import BoundedBatch
from tandem.sim.curves import Saturating
from tandem.sim.executor import SimExecutor
from tandem.sim.run import Simulation

PROFILE = datasheet_profile("l4", "qwen2.5-0.5b")
LOAD = [PlannedRequest(n, 0.1 * n, tuple(range(n, n + 40)), 5 + n % 4) for n in range(20)]


def simulated(steps: Steps | None, profile: Profile = PROFILE, seed: int = 0) -> Figures:
    arrivals, _ = arrivals_of(LOAD, Training(), profile.info.vocab_size, 0)
    clock = VirtualClock()
    loop, _ = build_simulation(resolve({}), profile, clock, seed=seed)
    return run_once(loop, clock, arrivals, PROFILE.rates, steps, seed=0)


def test_a_run_without_training_is_accounted_for():
    found = simulated(None)
    assert set(found.parts) == {"decode", "prefill", "mixed"} or set(found.parts) == {
        "decode",
        "prefill",
    }
    assert sum(part.count for part in found.parts.values()) == found.iterations
    for part in found.parts.values():
        assert part.predicted_s == pytest.approx(part.seconds)
    assert found.failed == 0 and found.training_tokens_s == 0.0
    assert found.outside_s == pytest.approx(0.0, abs=1e-9)


def test_training_goes_on_until_the_last_request_has_ended():
    found = simulated(Steps(tokens=32))
    assert {"training", "slice", "update"} <= set(found.parts)
    assert found.parts["update"].count > 5 and found.training_tokens_s > 100.0
    for part in found.parts.values():
        assert part.predicted_s == pytest.approx(part.seconds)


def test_an_account_that_learns_predicts_before_it_learns():
    """On a device that is slower than its profile says, in passes, slices and updates alike."""
    clock, steps = VirtualClock(), Steps(tokens=32)
    place = FORWARD_TERMS.index("cold")
    forward = (*PROFILE.rates.forward[:place], 2e-3, *PROFILE.rates.forward[place + 1 :])
    rates = replace(PROFILE.rates, forward=forward)
    slow = replace(
        rates,
        forward=tuple(1.3 * each for each in rates.forward),
        slices=tuple(1.3 * each for each in rates.slices),
        update_s=1.3 * rates.update_s,
    )
    loop, _ = build_simulation(resolve({}), replace(PROFILE, rates=slow), clock, seed=0)
    fixed, learned = (Account(LatencyModel(rates), learns=each) for each in (False, True))
    predicted: list[tuple[float, float]] = []

    def on_plan(plan: LanePlan, result: StepResult) -> None:
        fixed(plan, result)
        learned(plan, result)
        kind = next(iter(fixed.parts))
        predicted.append((fixed.parts[kind].predicted_s, learned.parts[kind].predicted_s))

    loop.on_plan = on_plan
    arrivals, _ = arrivals_of(LOAD, Training(), PROFILE.info.vocab_size, 0)
    supply = steps.supply(PROFILE.info.vocab_size, 0)
    Simulation(loop, clock, arrivals, [steps.trainer], supply=supply).run()
    assert set(fixed.parts) == set(learned.parts) >= {"training", "slice", "update"}
    for kind, part in fixed.parts.items():
        assert part.predicted_s == pytest.approx(part.seconds / 1.3)
        mine = learned.parts[kind]
        assert (mine.count, mine.seconds) == (part.count, part.seconds)
        assert mine.predicted_s == pytest.approx(part.seconds, rel=0.1)
    assert predicted[0][0] == predicted[0][1] < predicted[-1][0] < predicted[-1][1]


def test_equal_seeds_supply_equal_steps_and_no_step_twice():
    steps = Steps(sequences=2, tokens=8)
    first, second = steps.supply(50, 1), steps.supply(50, 1)
    made = [first() for _ in range(3)]
    assert made == [second() for _ in range(3)]
    assert len({step.step_id for step in made}) == 3 and made[0].num_tokens == 14


def test_the_same_run_is_no_error_and_a_slower_device_is_one():
    same = compare([simulated(None)] * 3, [simulated(None)] * 3)
    assert [each.figure for each in same] == [
        "output_tokens_s", "ttft_mean_s", "ttft_p95_s", "tpot_mean_s", "tpot_p95_s",
    ]  # fmt: skip
    assert all(each.holds and each.error == 0.0 for each in same)
    slow = replace(PROFILE.rates, forward=tuple(1.3 * each for each in PROFILE.rates.forward))
    worse = compare([simulated(None)], [simulated(None, replace(PROFILE, rates=slow))])
    assert {each.figure for each in worse if not each.holds} >= {"tpot_mean_s", "ttft_mean_s"}
    run = simulated(None)
    assert agree(same, [run], [run]) and not agree(worse, [run], [run])
    assert not agree(same, [run], [replace(run, failed=1)])


def test_what_real_runs_differ_by_is_allowed_and_medians_are_compared():
    base = simulated(None)
    real = [replace(base, tpot_mean_s=value) for value in (0.9, 1.0, 1.2)]
    for value, holds in ((1.25, True), (0.75, True), (1.35, False)):
        found = compare(real, [replace(base, tpot_mean_s=value)])
        tpot = next(each for each in found if each.figure == "tpot_mean_s")
        assert tpot.real == 1.0 and tpot.spread == pytest.approx(0.3)
        assert tpot.holds is holds


@pytest.mark.parametrize("policy", ["rt_lm", "hpf"])
def test_a_real_run_has_the_constants_of_the_profile_as_a_simulated_one(monkeypatch, policy):
    profile = replace(PROFILE, batching=Batching(phi=0.2, eta=0.03, batch=5))
    policies: list[BoundedBatch] = []
    monkeypatch.setattr(
        "tandem.cli.fidelity.run_once", lambda loop, *_: policies.append(loop.scheduler._policy)
    )
    settings = resolve({"scheduling": {"policy": policy}})
    lengths = parse_lengths("4")
    load = WorkloadOptions(Arrivals.POISSON, lengths, lengths, Limits())
    executor = SimExecutor(profile, VirtualClock(), curve=Saturating())
    _real(executor, settings, profile, FidelityOptions(load), [])
    (found,) = policies
    assert found.options.batch == 5 and found.options.phi == 0.2


@pytest.mark.parametrize("flags", [[], ["--train", "--step-tokens", "24"]])
@pytest.mark.full
def test_a_real_model_beside_its_simulation(tmp_path, flags):
    out = tmp_path / "fidelity.json"
    result = CliRunner().invoke(
        app,
        [
            "bench", "fidelity", "demo", "--seconds", "1.5", "--rate", "6", "--runs", "2",
            "--prompt-tokens", "24", "--output-tokens", "6", "--profile-seconds", "2",
            "--kv-memory", "64MiB", "--out", str(out), *flags,
        ],
    )  # fmt: skip
    assert result.exit_code in (0, 1), result.output
    report = json.loads(out.read_text())
    assert report["schema"] == "tandem-fidelity-1"
    assert len(report["real"]) == len(report["simulated"]) == 2
    for run in (*report["real"], *report["simulated"]):
        assert run["failed"] == 0 and run["iterations"] > 0 and run["ttft_mean_s"] > 0
    assert all(run["outside_s"] > 0 for run in report["real"])
    if flags:
        assert report["real"][0]["training_tokens_s"] > 0
    assert "holds" in result.output and "outside of it" in result.output
    page = out.with_suffix(".md").read_text()
    assert report["machine"]["device"] == "cpu" and report["profile"]["info"]["model"] in page
    verdicts = [
        line.rsplit("| ", 1)[1] for line in page.splitlines() if line.endswith(("yes |", "no |"))
    ]
    held = [
        each["error"] for each in report["comparisons"] if abs(each["error"]) <= each["allowed"]
    ]
    assert len(verdicts) == len(report["comparisons"]) and verdicts.count("yes |") == len(held)
    assert ("SFT steps of 2 x 24 tokens" in page) is bool(flags)
    exits_well = all(abs(each["error"]) <= each["allowed"] for each in report["comparisons"])
    assert result.exit_code == (0 if exits_well else 1)


def test_a_report_that_its_page_would_replace_is_refused(tmp_path):
    out = str(tmp_path / "found.md")
    result = CliRunner().invoke(app, ["bench", "fidelity", "demo", "--out", out])
    assert result.exit_code == 2 and "--out is the JSON file" in " ".join(result.output.split())


def test_a_profile_of_something_else_is_refused(tmp_path):
    from tandem.estimators.profile import write_profile

    path = tmp_path / "other.json"
    write_profile(PROFILE, path)
    result = CliRunner().invoke(app, ["bench", "fidelity", "demo", "--profile", str(path)])
    assert result.exit_code == 2 and "is of something else" in " ".join(result.output.split())
