"""The search for constants: options that policies take, a rule that is kept, runs made once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import benchmarks.constants.__main__ as command
from benchmarks.constants.dials import DIALS, defaults, drawn, one_at_a_time, options_of, stepped
from benchmarks.constants.rule import allowed, by_workload, judge, score
from benchmarks.constants.workloads import HELD_OUT, SEARCH, Run, Share, measure
from tandem.scheduling.policies import mace, unified
from tandem.scheduling.registry import build_policy

OWN = {"mace": mace.Options(), "unified": unified.Options()}


# ---------------------------------------------------------------------- dials


@pytest.mark.parametrize("policy", DIALS)
def test_the_search_begins_at_the_policys_own_options(policy: str) -> None:
    options = options_of(policy, defaults(policy))
    assert {name: float(value) for name, value in options.items()} == {
        name: float(getattr(OWN[policy], name)) for name in options
    }


@pytest.mark.parametrize("policy", DIALS)
def test_every_point_is_allowed_by_the_policy(policy: str) -> None:
    points = [*one_at_a_time(policy), *drawn(policy, 200, 1)]
    for name in DIALS[policy]:
        points += [stepped(policy, defaults(policy), name, step) for step in (-1.0, 1.0)]
    for point in points:
        build_policy(policy, options_of(policy, point))
        for name, dial in DIALS[policy].items():
            assert dial.low <= point[name] <= dial.high
            assert dial.at(dial.part(point[name])) == pytest.approx(point[name], rel=0.01)


def test_draws_depend_on_the_seed_alone() -> None:
    assert list(drawn("mace", 5, 1)) == list(drawn("mace", 5, 1)) != list(drawn("mace", 5, 2))


# ---------------------------------------------------------------------- workloads


def test_no_held_out_run_is_in_the_search_set() -> None:
    names = {run.workload.name for run in SEARCH} & {run.workload.name for run in HELD_OUT}
    seeds = {run.seed for run in SEARCH} & {run.seed for run in HELD_OUT}
    assert not names and not seeds


@pytest.mark.parametrize("policy", DIALS)
def test_a_run_is_the_same_every_time(policy: str) -> None:
    workload = SEARCH[-1].workload
    run = Run(replace(workload, scale=replace(workload.scale, duration_s=4.0)), 3)
    share = measure(policy, options_of(policy, defaults(policy)), run)
    assert share == measure(policy, options_of(policy, defaults(policy)), run)
    assert share.workload == "small cache"
    assert 0.0 < share.goodput <= 1.0 and 0.0 < share.training <= 1.0


def test_requests_that_wait_for_training_lose_goodput() -> None:
    workload = SEARCH[0].workload
    run = Run(replace(workload, scale=replace(workload.scale, duration_s=6.0)), 3)
    never = measure("no_retrain", {}, run)
    first = measure("adainf", {}, run)
    assert (never.goodput, never.training) == (1.0, 0.0)
    assert first.goodput < 0.9 and first.training > 0.9


# ---------------------------------------------------------------------- rule


def shares(goodput: float, training: float) -> list[Share]:
    return [Share(name, goodput, training) for name in ("a", "a", "b")]


def test_goodput_is_not_bought_with_training() -> None:
    base = shares(0.5, 0.8)
    assert score(base) == pytest.approx(0.7)
    assert allowed(shares(0.9, 0.795), base) and not allowed(shares(0.9, 0.78), base)


def test_a_clear_gain_is_one_everywhere() -> None:
    base = shares(0.5, 0.8)
    assert judge(shares(0.53, 0.8), base).clear
    assert not judge(shares(0.51, 0.8), base).clear  # too little
    assert not judge(shares(0.6, 0.7), base).clear  # with less training
    mixed = [*shares(0.7, 0.8)[:2], Share("b", 0.4, 0.8)]
    verdict = judge(mixed, base)
    assert (verdict.worst_workload, verdict.worst_goodput) == ("b", pytest.approx(-0.1))
    assert verdict.gain.value > 0.02 and not verdict.clear
    assert by_workload(mixed)["a"].goodput == pytest.approx(0.7)


# ---------------------------------------------------------------------- search


def test_the_search_finds_a_peak_goes_on_and_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = command
    measured: list[str] = []

    def peak(policy: str, options: dict[str, str], run: Run) -> Share:
        """Best at a min_share of 0.2; without training above 0.3."""
        measured.append(policy)
        share = float(options["min_share"])
        goodput = 1.0 - abs(share - 0.2)
        return Share(run.workload.name, goodput, 0.5 if share <= 0.3 else 0.4)

    monkeypatch.setattr(module, "measure", peak)
    arguments = ["--policy", "unified", "--cache", str(tmp_path), "--out", str(tmp_path)]
    app = module.typer.Typer()
    app.command()(module.main)
    stopped = CliRunner().invoke(app, [*arguments, "--seconds", "0"])
    assert stopped.exit_code == 3 and not (tmp_path / "constants.md").exists()
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    once = len(measured)
    assert CliRunner().invoke(app, arguments).exit_code == 0 and len(measured) == once
    found = json.loads((tmp_path / "constants.json").read_text())["unified"]
    best = found["best"]["dials"]
    assert 0.15 < best.pop("min_share") < 0.25 and found["clear"]
    assert best == {name: value for name, value in defaults("unified").items() if name in best}
    assert len(found["held_out"]["best"]) == len(HELD_OUT)
    page = (tmp_path / "constants.md").read_text()
    assert page.strip() == done.output.strip()
    assert "| min_share | 0.0005 to 0.5 | 0.002 |" in page and "A clear gain." in page
