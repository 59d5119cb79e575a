"""A run's pairs are scored under what answered when they came; the page says what can be told."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.learning.report import RunKey, report
from benchmarks.learning.runs import PairScore, RunRecord
from benchmarks.learning.stream import EncodedPair, Feedback
from benchmarks.learning.teaching import Lessons
from benchmarks.mace_real.load import POLICIES, Options
from benchmarks.mace_real.page import page, verdict
from benchmarks.mace_real.run import Kept, Moment, _published, server_of
from benchmarks.reporting.bootstrap import Interval
from tandem.bench.measure import Outcome


def feedback(at_s: float) -> Feedback:
    return Feedback(at_s, EncodedPair("key", "source", (1,), (2,), (3,)))


def test_what_answered_when_a_pair_came_judges_it_also_after_a_roll_back(tmp_path: Path) -> None:
    moments = [Moment(2.0, 1, "a"), Moment(4.0, 2, "b"), Moment(6.0, 1, "a"), Moment(8.0, 0, "")]
    found = [_published(moments, feedback(at_s), tmp_path) for at_s in (1.0, 2.0, 5.0, 7.0, 9.0)]
    assert [each and each.number for each in found] == [None, 1, 2, 1, None]
    assert found[2] is not None and found[2].path == str(tmp_path / "2")


def test_runs_are_of_all_policies_and_a_seed_is_finished_before_the_next() -> None:
    options = Options("m")
    keys = options.keys
    assert len(set(keys)) == len(keys) == 45
    assert [key.policy for key in keys[:5]] == list(POLICIES)
    assert {key.seed for key in keys[:15]} == {1}


def test_servers_differ_in_their_policy_alone(tmp_path: Path) -> None:
    options = Options("m")
    ekya = server_of(RunKey(0.5, "ekya", 1), options, 8000, tmp_path)
    mace = server_of(RunKey(0.5, "mace", 1), options, 8000, tmp_path)
    assert list(mace.flags) == ["--policy", "mace"]
    assert list(ekya.flags) == ["--policy", "ekya", "--policy-option", "interval_s=60"]
    assert replace(ekya, flags=()) == replace(mace, flags=())


def kept(gain: float, refused: int = 0) -> Kept:
    pairs = [
        PairScore(f"pair {n}", float(n), "set", 0, (-1.0, 1.0)[n % 2] + gain * (n > 20), 0.0)
        for n in range(40)
    ]
    outcomes = [Outcome(n, n, n, [n + 0.1, n + 0.2], n + 1.0, 5, 2, True) for n in range(40)]
    record = RunRecord(40.0, outcomes, Lessons(), pairs)
    return Kept(record, ["it repeats itself"] * refused, {"consumed": 30})


def test_the_page_says_which_policies_can_be_told_apart() -> None:
    runs = {
        RunKey(0.5, policy, seed): kept(gain, refused)
        for seed in (1, 2)
        for policy, gain, refused in (
            ("no_retrain", 0.0, 0),
            ("mace", 2.0, 0),
            ("unified", 2.0, 1),
        )
    }
    text = page("here", report({key: each.record for key, each in runs.items()}), runs, 45)
    assert "6 of 45 runs" in text and text.startswith("# MACE's figures")
    assert "`unified` over `no_retrain` 1.450" in text and ": higher" in text
    assert "`unified` over `mace` 1.000 (1.000 to 1.000): not separable" in text
    assert "wins at least as often as `no_retrain` at every retrain rate" in text
    assert "the paper's is 1.1: reached" in text
    assert "| 0.5 | unified | 2 | 0 | 2 | 60 consumed |" in text


def test_verdicts() -> None:
    assert verdict(Interval(1.2, 1.1, 1.3)) == "higher"
    assert verdict(Interval(0.8, 0.7, 0.9)) == "lower"
    assert verdict(Interval(1.2, 0.9, 1.3)) == "not separable"


def test_a_kept_run_is_read_back() -> None:
    run = kept(1.0, 1)
    assert msgspec.json.decode(msgspec.json.encode(run), type=Kept) == run


def test_without_shared_data_nothing_is_run(tmp_path: Path) -> None:
    done = invoked("mace_real", "--data", str(tmp_path / "none"))
    assert done.startswith("skipped: no shared data")


@pytest.mark.parametrize("name", ["tastes", "poison", "mace_real", "abuse"])
def test_the_studies_explain_their_options(name: str) -> None:
    done = invoked(name, "--help")
    assert "--model" in done and "--port" in done


def invoked(name: str, *arguments: str) -> str:
    """What a study writes; it must succeed."""
    app = typer.Typer()
    app.command()(importlib.import_module(f"benchmarks.{name}.__main__").main)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output
