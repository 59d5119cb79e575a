"""Workload, figures, report and order of benchmarks/attainment; no engine is run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from itertools import count, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import benchmarks.attainment.__main__ as command
from benchmarks.attainment import engine
from benchmarks.attainment.figures import (
    Measurement,
    Unloaded,
    capacity,
    gap,
    measurement,
    pairs,
    summary,
    unloaded,
    verdict,
)
from benchmarks.attainment.report import Setup, as_data, as_markdown
from benchmarks.attainment.workload import Job, Workload, clipped
from tandem.bench.measure import Outcome
from tandem.bench.traces import TraceRecord
from tandem.bench.workload import Shape
from tandem.core.events import EngineStats, TokenEvent
from tandem.core.request import Request
from tandem.core.slo import Slo
from tandem.core.training import StepOutcome, TrainingStep
from tandem.estimators.datasheet import datasheet_profile
from tandem.estimators.profile import read_profile
from virtual_time import virtually

SLO = Slo(ttft_s=1.0, tpot_s=0.1)
RECORDS = [TraceRecord(0.5 * at + 0.1 * (at % 3), 100 + at, 10 + at % 7) for at in range(400)]


# ---------------------------------------------------------------------- workload


def test_arrivals_are_the_traces_stretched_to_the_rate() -> None:
    workload = Workload(RECORDS, context=4096, vocabulary=50)
    job = workload.open_loop(rate=4.0, seconds=20.0, place=1, places=4)
    assert len(job.at_s) == 80 and job.at_s[0] == 0.0
    assert job.at_s[-1] == pytest.approx(79 / 4.0)
    recorded = [each.at_s or 0.0 for each in RECORDS[100:180]]
    span_s = recorded[-1] - recorded[0]
    for ours, theirs in zip(pairwise(job.at_s), pairwise(recorded), strict=True):
        stretched = (theirs[1] - theirs[0]) * (79 / 4.0) / span_s
        assert ours[1] - ours[0] == pytest.approx(stretched)


def test_equal_arguments_give_equal_jobs_and_other_rounds_other_requests() -> None:
    job, again = (Workload(RECORDS, 4096, 50).open_loop(4.0, 10.0, place, 4) for place in (2, 2))
    assert job == again and job.requests() == again.requests()
    workload = Workload(RECORDS, 4096, 50)
    other, loaded = workload.open_loop(4.0, 10.0, 3, 4), workload.open_loop(8.0, 10.0, 2, 4)
    alone = workload.closed_loop(1, 10.0)
    firsts = [each.requests()[0].prompt[:20] for each in (job, other, loaded, alone)]
    assert len(set(firsts)) == 4


def test_lengths_are_the_traces_in_another_order() -> None:
    workload = Workload(RECORDS, 4096, 50, length_scale=1.0)
    job = workload.closed_loop(3, 1.0)
    found = sorted(zip(job.prompt_tokens, job.output_tokens, strict=True))
    assert found == sorted((each.prompt_tokens, each.output_tokens) for each in RECORDS)
    assert job.prompt_tokens != [each.prompt_tokens for each in RECORDS]
    assert job.at_once == 3
    assert workload.mean_tokens()[0] == pytest.approx(299.5)
    assert max(workload.closed_loop(3, 1.0, 12).output_tokens) == 12


def test_prompt_and_output_fit_into_the_model() -> None:
    assert clipped(Shape(100, 28), 128) == Shape(100, 28)
    assert clipped(Shape(101, 28), 128) == Shape(100, 28)
    workload = Workload([TraceRecord(0.0, 9000, 900), TraceRecord(1.0, 3, 2)], 128, 50, 0, 1.0)
    job = workload.closed_loop(1, 1.0)
    assert sorted(zip(job.prompt_tokens, job.output_tokens, strict=True)) == [(3, 2), (64, 64)]


def test_a_request_is_due_with_its_last_token() -> None:
    job = Job(5.0, [2.0], [10], [11], 50, 0, ttft_slo=1.0, tpot_slo=0.1)
    (request,) = job.requests()
    assert job.slo == SLO and job.due_s(request) == pytest.approx(4.0)
    assert len(request.prompt) == 10 and max(request.prompt) < 50
    assert Job(**asdict(job)) == job


# ---------------------------------------------------------------------- figures


def outcome(index: int, ttft_s: float = 0.5, tpot_s: float = 0.05, error: str = "") -> Outcome:
    at_s = float(index)
    first = at_s + ttft_s
    last = first + 10 * tpot_s
    return Outcome(index, at_s, at_s, [first, last], last, 5, 11, error=error or None)


def window(
    policy: str, outcomes: list[Outcome], round_: int = 0, load: float = 0.6, steps: int = 0
) -> Measurement:
    ends_s = [0.5 * step for step in range(1, steps + 1)]
    return Measurement(policy, load, round_, 10.0, outcomes, 110, ends_s, 100)


def test_attainment_is_of_all_requests() -> None:
    found = summary(
        [
            window(
                "unified",
                [
                    outcome(0),
                    outcome(1, ttft_s=2.0),
                    outcome(2, tpot_s=0.2),
                    outcome(3, error="unfinished"),
                    Outcome(4, 4.0, 4.0, error="unfinished"),
                ],
                steps=30,
            )
        ],
        SLO,
    )
    assert found["attainment"] == pytest.approx(0.2)
    assert found["ttft_attainment"] == pytest.approx(0.6)
    assert found["tpot_attainment"] == pytest.approx(0.4)
    assert found["requests"] == 5 and found["unfinished"] == 2
    assert found["ttft_p50_ms"] == pytest.approx(500.0)
    assert found["tpot_p50_ms"] == pytest.approx(50.0)
    assert found["output_tokens_per_s"] == pytest.approx(11.0)
    # Steps that ended after the last arrival do not count.
    assert found["training_tokens_per_s"] == pytest.approx(20 * 100 / 10.0)


def test_figures_without_an_answer() -> None:
    found = summary([window("adainf", [Outcome(0, 0.0, 0.0, error="unfinished")])], SLO)
    assert found["attainment"] == 0.0 and "ttft_p50_ms" not in found


def test_pairs_match_requests_within_a_round() -> None:
    ours = [window("unified", [outcome(0), outcome(1, ttft_s=2.0)], 0)]
    ours += [window("unified", [outcome(0), outcome(1)], 1)]
    theirs = [window("no_retrain", [outcome(0), outcome(1)], 0)]
    found = pairs(ours, theirs, SLO)
    assert found == {"0.6/0": [(1.0, 1.0), (0.0, 1.0)]}
    with pytest.raises(AssertionError, match="not the same requests"):
        pairs(ours, [window("no_retrain", [outcome(0)], 0)], SLO)


def test_the_interval_is_of_paired_differences() -> None:
    # Half of the requests fail under both: the difference is exactly nought all the same.
    mixed = [outcome(index, ttft_s=2.0 * (index % 2)) for index in range(200)]
    same = gap(pairs([window("unified", mixed)], [window("no_retrain", mixed)], SLO))
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    worse = [replace(each) for each in mixed]
    for index in range(0, 20, 2):
        worse[index] = outcome(index, ttft_s=2.0)
    found = gap(pairs([window("unified", worse)], [window("no_retrain", mixed)], SLO))
    assert found.value == pytest.approx(-0.05)
    assert -0.1 < found.low < found.value < found.high < 0.0


def test_only_policies_that_attain_are_rivals() -> None:
    good = [outcome(index) for index in range(100)]
    bad = [outcome(index, ttft_s=2.0) for index in range(100)]
    windows = [
        window("no_retrain", good),
        window("unified", good, steps=10),
        window("static", bad, steps=20),
        window("mace", good, steps=5),
        window("mace", good, load=0.3, steps=15),
    ]
    found = verdict(0.6, windows, SLO)
    assert found is not None
    assert found.within and found.sure and found.ahead
    assert found.rivals == {"mace": pytest.approx(50.0)}
    assert found.training_tokens_per_s == pytest.approx(100.0)
    windows.append(window("fcfs", good, steps=10))
    behind = verdict(0.6, windows, SLO)
    assert behind is not None and not behind.ahead
    assert verdict(0.3, windows, SLO) is None


@pytest.mark.parametrize(("round_", "ahead"), [(0, True), (1, False)])
def test_rivals_are_compared_in_the_rounds_that_they_had(round_: int, ahead: bool) -> None:
    good = [outcome(index) for index in range(100)]
    windows = [window("no_retrain", good, each) for each in range(2)]
    windows += [window("unified", good, each, steps=steps) for each, steps in ((0, 18), (1, 6))]
    windows.append(window("mace", good, round_, steps=15))
    found = verdict(0.6, windows, SLO)
    assert found is not None and found.training_tokens_per_s == pytest.approx(120.0)
    assert found.rivals == {"mace": pytest.approx(150.0)} and found.ahead is ahead


def test_bounds_come_from_closed_loops() -> None:
    ended = [asdict(outcome(index)) for index in range(10)]
    answer: dict[str, Any] = {"seconds": 8.0, "outcomes": [*ended, asdict(Outcome(10, 0.0, 0.0))]}
    answer["outcomes"][-1]["error"] = "unfinished"
    assert unloaded(answer) == Unloaded(pytest.approx(0.5), pytest.approx(0.05))
    # Of those that ended (at 1, 2, ...), six did after 2.5 and until 8 seconds.
    assert capacity(answer, settle_s=2.5) == pytest.approx(6 / 5.5)


# ---------------------------------------------------------------------- report


def test_report_of_two_loads() -> None:
    good = [outcome(index) for index in range(100)]
    windows = [
        window(policy, good, round_, load, steps=steps)
        for load in (0.3, 0.6)
        for round_ in range(2)
        for policy, steps in (("no_retrain", 0), ("unified", 10), ("mace", 5))
    ]
    windows.append(window("adainf", [Outcome(0, 0.0, 0.0, error="unfinished")], 5, 0.6))
    windows[0].others = 0.25
    policies: dict[str, dict[str, str]] = {"no_retrain": {}, "unified": {"ceiling_s": "0.1"}}
    setup = Setup(
        {"device": "cpu"},
        {"tandem": "0"},
        "tiny",
        "float32",
        SLO,
        Unloaded(0.2, 0.02),
        5.0,
        100.0,
        20.0,
        10.0,
        {**policies, "mace": {}, "adainf": {}},
        "measured in 60 s: 9 passes",
        sequence_tokens=128,
    )
    data = json.loads(json.dumps(as_data(setup, windows)))
    page = as_markdown(data)
    assert len(data["rows"]) == 7 and data["rows"][1]["gap"]["value"] == 0.0
    assert data["rows"][1]["rate"] == pytest.approx(1.5)
    assert [len(row["rounds"]) for row in data["rows"]] == [2, 2, 2, 2, 2, 2, 1]
    assert "## 30% of capacity: 1.50 requests/s" in page
    assert "A training step: 2 x 128 tokens." in page
    assert "| `unified` | 100.0% | 100.0% | 100.0% | +0.0 (+0.0 to +0.0) | +0.0, +0.0 |" in page
    assert "| 60% | +0.0 (+0.0 to +0.0) | yes, surely | 100 | `mace` 50 | yes |" in page
    assert "Policy options: unified ceiling_s=0.1." in page
    assert "The engines start from a profile, measured in 60 s: 9 passes." in page
    assert (
        "in 2 rounds of `no_retrain`, `unified`, `mace`; 1 requests in 1 round of `adainf`" in page
    )
    assert "fell behind" not in page
    assert "took 0% of the cores in the median window, 25% in the worst" in page
    data["rows"][0]["client_lag_p99_ms"] = 80.0
    assert "fell behind" in as_markdown(data)


# ---------------------------------------------------------------------- command


def test_every_policy_runs_once_a_round_and_load_in_changing_order() -> None:
    turns = command.turns(["a", "b", "c"], [0.3, 0.6], 2, 2)
    assert len(turns) == 12 == len(set(turns))
    firsts = [policy for _, _, policy in turns[::3]]
    assert firsts == ["a", "b", "b", "c"]
    for loads in ([0.3, 0.6], [0.3, 0.6, 0.9]):
        turns = command.turns(["no_retrain", "unified"], loads, 4, 0)
        for load in loads:
            firsts = [policy for _, one, policy in turns[::2] if one == load]
            assert firsts[::2] != firsts[1::2], "no policy is always the first one"


def test_rivals_run_in_the_first_rounds_only() -> None:
    turns = command.turns(["no_retrain", "unified", "ekya"], [0.6], 3, 1)
    assert [policy for _, _, policy in turns[:3]] == ["no_retrain", "unified", "ekya"]
    assert [(number, policy) for number, _, policy in turns[3:]] == [
        (1, "unified"), (1, "no_retrain"), (2, "no_retrain"), (2, "unified")
    ]  # fmt: skip


def test_time_is_divided_between_windows() -> None:
    module = command
    assert module.window_seconds(18.0, 42) == pytest.approx(18 * 60 / 42 - module.DRAIN_S)
    with pytest.raises(typer.BadParameter, match="need"):
        module.window_seconds(1.0, 42)


def test_policies_and_options_by_name() -> None:
    module = command
    assert list(module.choose(None)) == list(module.POLICIES)
    chosen = module.with_options(module.choose(["unified"]), ["unified.ceiling_s=0.1"])
    assert chosen == {"no_retrain": {}, "unified": {"ceiling_s": "0.1"}}
    assert module.POLICIES["unified"] == {}
    with pytest.raises(typer.BadParameter, match="no policy"):
        module.choose(["nobody"])
    for wrong in ("mace.bins=false", "unified.ceiling_s", "unified"):
        with pytest.raises(typer.BadParameter):
            module.with_options(module.choose(["unified"]), [wrong])


def plan(module: ModuleType, folder: Path, profile_s: float) -> Any:
    given = (10.0, 10.0, 5.0, None, None, profile_s, 64, folder)
    return module.Plan("tiny", "cpu", "float32", {}, [0.9], 1, 1, *given)


def test_engines_start_from_one_profile_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, measured = command, datasheet_profile("l4", "qwen2.5-0.5b")
    asked: list[tuple[Any, ...]] = []

    def in_new_process(call: Any, *given: Any) -> Any:
        asked.append((call, *given))
        return measured

    monkeypatch.setattr(module, "in_new_process", in_new_process)
    common = {"device": "cpu", "dtype": "float32", "threads": 2}
    assert module._profile(plan(module, tmp_path, 0.0), Path("model"), common) == ("", "")
    path, source = module._profile(plan(module, tmp_path, 30.0), Path("model"), common)
    assert read_profile(Path(path)).rates == measured.rates and source == measured.source
    assert asked == [(engine.profiled, engine.settings_of("model", common), 30.0)]


def test_without_the_traces_it_says_so(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command.main)
    result = CliRunner().invoke(app, ["--data", str(tmp_path)])
    assert result.exit_code != 0
    assert f"skipped: no shared data at {tmp_path}" in str(result.exception or result.output)


# ---------------------------------------------------------------------- engine


class Answering:
    """A client whose requests emit a token every 10 ms, and never the last of a long one."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.asked.append(request)
        for token in range(request.sampling.max_tokens):
            await asyncio.sleep(0.01 if request.sampling.max_tokens < 10 else 60.0)
            yield TokenEvent(request.request_id, 0, (token,))

    async def train(self, step: TrainingStep) -> StepOutcome:
        await asyncio.sleep(0.02)
        return StepOutcome(step.step_id, step.trainer, 1, True, 1.0, 1.0, 1e-4, (), 0.0, 0.0, 0.0)

    async def cancel_steps(self, trainer: str) -> None:
        self.cancelled += 1

    async def stats(self) -> EngineStats:
        return EngineStats(iterations=len(self.asked))


def job(**changes: Any) -> Job:
    plain = Job(0.2, [0.0, 0.05, 0.1], [4, 5, 6], [3, 3, 20], 50, 0, ttft_slo=0.1, tpot_slo=0.01)
    return replace(plain, **changes)


def test_open_loop_sends_at_its_times_and_gives_up_what_is_too_late() -> None:
    client = Answering()
    answer = virtually(engine.Window(client, job(train=True), count()).run())  # type: ignore[arg-type]
    found = measurement("unified", 0.6, 0, json.loads(json.dumps(answer)))
    assert [each.error for each in found.outcomes] == [None, None, "unfinished"]
    assert [each.intended_s for each in found.outcomes] == [0.0, 0.05, 0.1]
    assert [each.sent_s for each in found.outcomes] == pytest.approx([0.0, 0.05, 0.1])
    assert found.outcomes[0].output_tokens == 3 and len(found.outcomes[0].output_s) == 2
    assert found.outcomes[0].tpot_s == pytest.approx(0.01)
    assert found.output_tokens == 6 and found.stats["iterations"] == 3
    assert client.asked[0].slo == Slo(0.1, 0.01) and client.cancelled == 1
    assert found.training_tokens >= 2 * 1024


def test_closed_loop_keeps_so_many_and_trains_only_if_told() -> None:
    client = Answering()
    closed = job(at_once=2, output_tokens=[3, 3, 3], seconds=0.15)
    answer = virtually(engine.Window(client, closed, count()).run())  # type: ignore[arg-type]
    assert [each["error"] for each in answer["outcomes"]] == [None] * 3
    assert answer["outcomes"][2]["sent_s"] > 0.02
    assert answer["step_ends_s"] == [] and client.cancelled == 0
