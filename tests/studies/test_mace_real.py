"""A run's pairs are scored under what answered when they came; the page says what can be told."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.learning.report import RunKey, report
from benchmarks.learning.runs import PairScore, RunRecord
from benchmarks.learning.stream import EncodedPair, Feedback
from benchmarks.learning.teaching import Lessons, Published
from benchmarks.live import rows
from benchmarks.mace_real.__main__ import even, finished, merged
from benchmarks.mace_real.load import POLICIES, Options
from benchmarks.mace_real.page import page, verdict
from benchmarks.mace_real.run import Kept, Moment, _published, as_row, of_row, server_of
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
    assert list(mace.flags) == ["--tpot-slo", "0.2", "--policy", "mace"]
    assert list(ekya.flags)[2:] == ["--policy", "ekya", "--policy-option", "interval_s=30"]
    assert replace(ekya, flags=()) == replace(mace, flags=())


def kept(gain: float, refused: int = 0) -> Kept:
    """A version from the 21st pair on, which gives pairs `gain` nats more; none without a gain."""
    taught = [gain * (n > 20) for n in range(40)]
    pairs = [
        PairScore(f"pair {n}", float(n), "set", int(more > 0), (-1.0, 1.0)[n % 2] + more, 0.0)
        for n, more in enumerate(taught)
    ]
    served = range(40 if gain else 0)
    outcomes = [Outcome(n, n, n, [n + 0.1, n + 0.2], output_tokens=2) for n in served]
    moments = [Moment(20.5, 1, "hash")] if gain else []
    published = [Published(each.at_s, 1, each.content_hash, "", 0) for each in moments]
    record = RunRecord(40.0, outcomes, Lessons(published, [0.5], 30), pairs)
    return Kept(record, moments, ["it repeats itself"] * refused, {"consumed": 30})


def page_of(gains: dict[str, float]) -> str:
    """Of two seeds; half of the pairs are lost without a gain."""
    runs = {
        RunKey(0.5, policy, seed): kept(gain, 1)
        for seed in (1, 2)
        for policy, gain in gains.items()
    }
    return page("here", report({key: each.record for key, each in runs.items()}), runs, 45)


def test_the_page_says_which_policies_can_be_told_apart() -> None:
    text = page_of({"no_retrain": 0.0, "mace": 2.0, "unified": 2.0})
    assert "6 of 45 runs" in text and text.startswith("# MACE's figures")
    assert "`unified` against `no_retrain`: win rate 1.450" in text
    assert "times, higher; CLPD 0.950" in text
    assert "`mace`: win rate 1.000 (1.000 to 1.000) times, not separable" in text
    assert "1.450 (1.182 to 1.938) at 0.5. The bar is 1.1: reached." in text
    assert "| 0.5 | unified | 2 | 2 | 2 | 60 consumed |" in text
    assert "| 0.5 | no_retrain | 80 | 0.500 | 0.00 | - | - | - | 2 |" in text


def test_the_page_claims_nothing_where_nothing_was_learned() -> None:
    text = page_of({"no_retrain": 0.0, "unified": 0.0})
    assert "win rate 1.000 (1.000 to 1.000) times, not separable" in text
    assert "The bar is 1.1: missed." in text
    assert "| 0.5 | unified | 3 of 3 | 26 | 0 | 0.000 (0.000 to 0.000)" in text


def test_the_page_shows_how_a_gain_comes_with_time() -> None:
    text = page_of({"no_retrain": 0.0, "unified": 2.0})
    rows = [line for line in text.splitlines() if "of 3 |" in line]
    assert [row.split(" | ")[3:5] for row in rows] == [["28", "0"], ["26", "12"], ["26", "26"]]
    assert "| 0.000 (0.000 to 0.000) | 0.000" in rows[0] and "| 2.000 (2.000 to 2.000) |" in rows[2]


@pytest.mark.parametrize(
    ("interval", "said"),
    [((1.2, 1.1, 1.3), "higher"), ((0.8, 0.7, 0.9), "lower"), ((1.2, 0.9, 1.3), "not separable")],
)
def test_verdicts(interval: tuple[float, float, float], said: str) -> None:
    assert verdict(Interval(*interval), 1.0) == said


def test_a_kept_run_is_read_back() -> None:
    run = kept(1.0, 1)
    failed = run.record.outcomes[3] = Outcome(3, 3, 3, [], error="http 503")
    again = of_row(json.loads(json.dumps(as_row(run))))
    assert again == run
    assert again.record.outcomes[3].error == failed.error


def test_policies_are_averaged_over_the_seeds_that_all_have() -> None:
    both = ("mace", "unified")
    runs = {RunKey(0.5, policy, seed): kept(1.0) for policy in both for seed in (1, 2)}
    del runs[RunKey(0.5, "mace", 2)]
    assert {machine: list(part) for machine, part in even({"a": runs}, both).items()} == {
        "a": [RunKey(0.5, "mace", 1), RunKey(0.5, "unified", 1)]
    }
    assert even({"a": runs}, ("mace", "ekya", "unified")) == {}


def test_policies_are_compared_on_one_machine_and_seeds_may_come_from_several() -> None:
    keys = [RunKey(0.5, policy, seed) for seed in (1, 2) for policy in ("mace", "unified")]
    runs = {key: kept(1.0) for key in keys}
    first = {key: runs[key] for key in keys[:3]}
    other = {key: runs[key] for key in (keys[0], keys[1], keys[3])}
    parts = even({"a": first, "b": other}, ("mace", "unified"))
    assert {machine: list(part) for machine, part in parts.items()} == {"a": keys[:2]}
    parts = even({"a": first, "b": runs}, ("mace", "unified"))
    assert {machine: list(part) for machine, part in parts.items()} == {
        "a": keys[:2],
        "b": keys[2:],
    }
    assert list(merged(parts, keys)) == keys


def test_runs_of_other_code_or_options_are_not_of_the_page(tmp_path: Path) -> None:
    keys, path = [RunKey(0.5, "mace", 1), RunKey(0.5, "unified", 1)], tmp_path / "rows.jsonl"
    for key, name in zip(keys, ("older", "this"), strict=True):
        rows.append(path, {"made": name, "machine": "a", **asdict(key), **as_row(kept(1.0))})
    found = finished(path, "this", keys)
    assert {machine: list(part) for machine, part in found.items()} == {"a": [keys[1]]}


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
