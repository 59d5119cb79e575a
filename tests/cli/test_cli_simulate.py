"""`tandem simulate` and `tandem profile`: files, figures, messages."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tandem.bench.answers import Answer
from tandem.cli import app
from tandem.cli.profile import _terms, doubts
from tandem.cli.profile_terms import FORWARD_WORDS, SLICE_WORDS
from tandem.cli.tune import tune
from tandem.config import Settings
from tandem.core.errors import InvalidRequest
from tandem.estimators.datasheet import datasheet_profile
from tandem.estimators.profile import FitError, read_profile, write_profile
from tandem.estimators.terms import FORWARD_TERMS, SLICE_TERMS

LOAD = ["--rate", "4", "--max-requests", "20", "--prompt-tokens", "64", "--output-tokens", "8"]


def run(*arguments: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments])


def test_a_load_on_a_data_sheet_gives_a_report_and_pictures(tmp_path):
    out = tmp_path / "run.json"
    result = run(
        "simulate", *LOAD, "--retrain-rate", "0.5", "--pair-tokens", "32", "--figures",
        "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "training steps" in result.output
    assert "times real time" in result.output and "between two events" not in result.output
    report = json.loads(out.read_text())
    assert report["schema"] == "tandem-simulation-1"
    assert report["summary"]["completed"] == 20
    assert report["steps"] >= 1 and report["training_tokens_s"] > 0
    assert 0 < report["busy_share"] <= 1
    names = {path.name for path in tmp_path.iterdir()}
    pictures = {
        f"run-{part}.{kind}"
        for part in ("latency", "timeline", "occupancy")
        for kind in ("png", "svg")
    }
    assert names == {"run.json"} | pictures


@pytest.mark.parametrize("overflow", ["0.5", "l4:llama-3-8b"])
def test_the_longest_requests_go_to_a_second_engine(tmp_path, overflow):
    """Half of the same device, or another one; the report is of both."""
    load = ["--rate", "1", "--max-requests", "100", "--prompt-tokens", "64"]
    load += ["--output-tokens", "lognormal:32:1.0", "--policy", "fcfs"]
    found = []
    for name, flags in (("one", []), ("two", ["--overflow", overflow])):
        out = tmp_path / f"{name}.json"
        result = run("simulate", *load, *flags, "--out", str(out))
        assert result.exit_code == 0, result.output
        found.append(json.loads(out.read_text()))
    one, two = found
    assert one["options"]["overflow"] == "" and two["options"]["overflow"] == overflow
    assert one["summary"]["completed"] == two["summary"]["completed"] == 100
    assert one["summary"]["tpot"] != two["summary"]["tpot"]


def test_a_second_engine_gets_what_is_longer_than_the_given_tokens(tmp_path):
    """All of it, on a third of the main engine's cores."""
    load = ["--rate", "1", "--max-requests", "20", "--prompt-tokens", "64"]
    load += ["--output-tokens", "16", "--policy", "fcfs", "--overflow", "0.25"]
    found = []
    for tokens in ("15", "16"):
        out = tmp_path / f"{tokens}.json"
        result = run("simulate", *load, "--overflow-tokens", tokens, "--out", str(out))
        assert result.exit_code == 0, result.output
        found.append(json.loads(out.read_text()))
    above, below = (each["summary"]["tpot"]["p50"] for each in found)
    assert 2.5 * below < above < 3.5 * below


@pytest.mark.parametrize(
    ("overflow", "problem"),
    [("1.5", "a share is between 0 and 1"), ("nothing", "there is no profile nothing")],
)
def test_a_second_engine_that_cannot_be_is_refused(overflow, problem):
    result = run("simulate", *LOAD, "--overflow", overflow)
    assert result.exit_code == 2 and problem in result.output


def test_several_policies_get_a_report_each(tmp_path):
    out = tmp_path / "run.json"
    result = run(
        "simulate", *LOAD, "--policy", "fcfs", "--policy", "mace", "--out", str(out)
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"run-fcfs.json", "run-mace.json"}
    lines = result.output.splitlines()
    (head,) = [place for place, line in enumerate(lines) if "fcfs" in line and "mace" in line]
    compared = "\n".join(lines[head:])
    for figure in ("requests complete", "inside both objectives", "output tokens/s"):
        assert figure in compared
    first = json.loads((tmp_path / "run-fcfs.json").read_text())["summary"]
    assert f"{1e3 * first['ttft']['p99']:.1f}" in compared


def test_one_policy_is_compared_with_nothing():
    result = run("simulate", *LOAD)
    assert result.exit_code == 0 and "inside both objectives" not in result.output


def test_a_profile_file_is_taken_and_the_same_flags_give_the_same_run(tmp_path):
    path = tmp_path / "l4.json"
    write_profile(datasheet_profile("l4", "qwen2.5-0.5b"), path)
    reports = []
    for name in ("a.json", "b.json"):
        result = run("simulate", *LOAD, "--profile", str(path), "--out", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        reports.append(json.loads((tmp_path / name).read_text()))
    assert reports[0]["summary"] == reports[1]["summary"]


@pytest.mark.parametrize(
    ("flags", "about"), [(["--rate", "0.05"], 30), (["--duration", "10"], 20)], ids=str
)
def test_a_load_is_there_without_flags_of_it(flags: list[str], about: int, tmp_path):
    out = tmp_path / "run.json"
    short = ["--prompt-tokens", "64", "--output-tokens", "8", "--out", str(out)]
    assert run("simulate", *flags, *short).exit_code == 0
    requests = json.loads(out.read_text())["summary"]["requests"]
    assert about / 2 < requests < about * 2


def test_a_recorded_curve_is_followed(tmp_path):
    (tmp_path / "losses.csv").write_text("step,train_loss\n1,0.7\n2,0.5\n3,0.3\n")
    out = tmp_path / "run.json"
    result = run(
        "simulate", *LOAD, "--training-steps", "4", "--pair-tokens", "16",
        "--loss-curve", str(tmp_path / "losses.csv"), "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "0.700 to 0.300 at" in result.output
    report = json.loads(out.read_text())
    assert report["options"]["loss_curve"] == str(tmp_path / "losses.csv")
    losses = report["losses"]
    assert [each["revision"] for each in losses] == [1, 2, 3, 4]
    assert [each["loss"] for each in losses] == pytest.approx([0.7, 0.5, 0.3, 0.3])
    times = [each["at_s"] for each in losses]
    assert times[0] > 0.0 and times == sorted(times)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--profile", "nowhere.json"], "there is no profile nowhere.json; `tandem profile MODEL`"),
        (["--profile", "h1000:llama-3-8b"], "no data sheet of 'h1000'"),
        (["--policy", "luck"], "there is no policy 'luck'"),
        (["--policy", "mace", "--policy-option", "pi_ft=9"], "the paper demands"),
        (["--policy-option", "x"], "is not NAME=VALUE"),
        (["--trace", "nowhere.csv"], "cannot read the trace"),
        (["--loss-curve", "nowhere.csv"], "--loss-curve needs --retrain-rate"),
        (
            ["--training-steps", "1", "--loss-curve", "nowhere.csv"],
            "cannot read the loss curve nowhere.csv",
        ),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_run(flags: list[str], said: str):
    result = run("simulate", *LOAD, *flags)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_no_policy_runs_while_a_later_one_cannot():
    flags = ["--policy", "unified", "--policy", "adainf", "--policy-option", "ceiling_s=0.1"]
    result = run("simulate", *LOAD, *flags)
    assert result.exit_code == 2 and "has no option 'ceiling_s'" in result.output
    assert "times real time" not in result.output


def test_the_folder_of_a_report_is_made_before_anything_is_measured(tmp_path):
    out = tmp_path / "new" / "run.json"
    assert run("simulate", *LOAD, "--out", str(out)).exit_code == 0
    assert json.loads(out.read_text())["summary"]["completed"] == 20
    for command in (["simulate", *LOAD], ["profile", "demo"], ["bench", "fidelity", "demo"]):
        for wrong, said in ((out / "x.json", "cannot make the folder"), (tmp_path, "is a folder")):
            result = run(*command, "--out", str(wrong))
            assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_how_long_to_measure_is_above_nought():
    for command in (["profile", "demo"], ["bench", "fidelity", "demo"]):
        result = run(*command, "--seconds", "0")
        assert result.exit_code == 2 and "or equal to 1" in result.output


@pytest.mark.full
def test_the_demo_model_is_profiled(tmp_path):
    out = tmp_path / "demo.json"
    result = run("profile", "demo", "--seconds", "3", "--out", str(out), "--kv-memory", "64MiB")
    assert result.exit_code == 0, result.output
    profile = read_profile(out)
    assert profile.info.num_layers > 0 and profile.ceilings.flops > 1e9
    assert profile.threads == profile.info.threads == torch.get_num_threads()
    assert "held out" in result.output and profile.errors["pass"].samples > 0
    assert 0.0 < profile.host_s < 0.1 and "beside the work of an iteration" in result.output
    assert profile.batching is not None and f"C {profile.batching.batch}, phi" in result.output
    assert set(profile.versions) == {"tandem", "torch", "transformers", "measured"}


def test_what_a_profile_cannot_say_is_told():
    sheet = datasheet_profile("l4", "qwen2.5-0.5b")
    assert list(doubts(sheet)) == [
        "no time was left for passes and slices and updates: what these take is a guess"
    ]
    measured = replace(sheet, rates=replace(sheet.rates, measured=True, slices_measured=True))
    assert list(doubts(measured)) == []
    restless = replace(measured, repeat=FitError(50, 0.0, 0.64, 1.5))
    (doubt,) = doubts(restless)
    assert "not quiet" in doubt and "64%" in doubt
    assert list(doubts(replace(measured, repeat=FitError(50, 0.0, 0.05, 0.2)))) == []
    errors = {"pass": FitError(400, 0, 0, 0), "slice": FitError(3, 0, 0, 0)}
    assert "say little (slice 3)" in next(doubts(replace(measured, errors=errors)))


def test_every_row_of_a_profile_is_explained():
    assert set(FORWARD_WORDS) == set(FORWARD_TERMS) and set(SLICE_WORDS) == set(SLICE_TERMS)
    console = Console(file=io.StringIO(), width=200)
    console.print(_terms(datasheet_profile("l4", "qwen2.5-0.5b")))
    shown = console.file.getvalue()
    assert "a token of a prompt" in shown and "microseconds" in shown


def test_a_profile_of_a_restless_machine_is_not_recommended(tmp_path, monkeypatch):
    made = datasheet_profile("l4", "qwen2.5-0.5b")
    calm = replace(made, rates=replace(made.rates, measured=True, slices_measured=True))
    restless = replace(calm, repeat=FitError(50, 0.0, 0.64, 1.5))
    executor = type("Executor", (), {"info": made.info})()
    monkeypatch.setattr("tandem.cli.profile.build_executor", lambda *_: executor)
    for profile, use in ((calm, "use it: tandem serve"), (restless, "measure again before you")):
        monkeypatch.setattr("tandem.cli.profile.measure", lambda *_, found=profile: found)
        result = run("profile", "demo", "--out", str(tmp_path / "x.json"))
        assert result.exit_code == 0 and use in " ".join(result.output.split()), result.output


def test_constants_of_batches_are_searched_for_the_answers_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.cli.tune.ALPHAS", (0.0, 1.0))
    monkeypatch.setattr("tandem.cli.tune.GATHERS", (1.0, 2.0))
    monkeypatch.setattr("tandem.bench.answers.BETAS", (4, 8))
    lengths, out = tmp_path / "lengths.csv", tmp_path / "l4.json"
    rows = [f"{10 + place},{5 + place % 7 * 5}" for place in range(60)]
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows))
    write_profile(datasheet_profile("l4", "qwen2.5-0.5b"), out)
    tuning = ["profile", "--profile", str(out), "--tune", str(lengths)]
    result = run(*tuning, "--policy-option", "static=true")
    assert result.exit_code == 0, result.output
    batching = read_profile(out).batching
    assert batching is not None and batching.alpha in (0.0, 1.0) and batching.gather in (1.0, 2.0)
    assert f"C {batching.batch}, phi {batching.phi:.4f} s" in result.output
    assert re.search(r"--overflow-tokens (2\d|3[0-5])\n", result.output)
    assert result.output.count("best") == 3 and "mean response" in result.output
    first = out.read_bytes()
    assert run(*tuning, "--policy-option", "static=true").exit_code == 0
    assert out.read_bytes() == first
    for wrong, said in (
        (["--policy-option", "statics=true"], "has no option 'statics'"),
        (["--tune", str(tmp_path / "nowhere")], "cannot read the trace"),
    ):
        refused = run(*tuning, *wrong)
        assert refused.exit_code == 2 and said in " ".join(refused.output.split())


def test_answers_that_do_not_fit_are_left_out_and_counted(tmp_path, monkeypatch):
    """With a single one, every mean was no number, and the first candidates were stored."""
    monkeypatch.setattr("tandem.cli.tune.ALPHAS", (0.0, 1.0))
    monkeypatch.setattr("tandem.cli.tune.GATHERS", (1.0, 2.0))
    monkeypatch.setattr("tandem.bench.answers.BETAS", (4, 8))
    lengths, out = tmp_path / "lengths.csv", tmp_path / "l4.json"
    rows = [f"{10 + place},{5 + place % 7 * 5}" for place in range(60)]
    for name, rest in (("all", []), ("some", ["40000,5", "9,40000"])):
        write_profile(datasheet_profile("l4", "qwen2.5-0.5b"), out)
        lengths.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows, *rest]))
        result = run("profile", "--profile", str(out), "--tune", str(lengths))
        assert result.exit_code == 0, result.output
        assert ("2 of 62 answers do not fit" in result.output) == (name == "some")
        assert "nan" not in result.output
    rows = [f"{40_000 + place},5" for place in range(60)]
    lengths.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]))
    refused = run("profile", "--profile", str(out), "--tune", str(lengths))
    assert refused.exit_code == 2 and "none of the answers fits" in refused.output


def test_a_failed_request_ends_the_search_and_no_size_is_tried_twice(monkeypatch):
    monkeypatch.setattr("tandem.cli.tune.ALPHAS", (1.0,))
    monkeypatch.setattr("tandem.cli.tune.GATHERS", (2.0,))
    monkeypatch.setattr("tandem.bench.answers.BETAS", (4, 8))
    profile, answer = datasheet_profile("l4", "qwen2.5-0.5b"), Answer(10, 5, 9, (5.0,) * 5)
    settings = replace(Settings(), scheduling=replace(Settings().scheduling, max_sequences=3))
    progress: list[float] = []
    _, tried = tune(profile, settings, [answer] * 20, progress.append)
    sizes = [each.batching.batch for each in tried if each.searched == "batch"]
    assert len(sizes) == len(set(sizes)) and max(sizes) == 3 and progress[-1] == 1.0
    with pytest.raises(InvalidRequest, match="cannot be simulated: refused"):
        tune(profile, settings, [replace(answer, input_tokens=40_000)])
