"""`python -m benchmarks echo`: pools share what they should, and figures say what happened."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.echo import __main__ as command
from benchmarks.echo import measured, online
from benchmarks.echo.policies import VARIANTS, Variant, chosen
from benchmarks.echo.pools import Limits, chats, documents, pool
from benchmarks.echo.report import Setup, as_page, goals, rows
from benchmarks.echo.runs import Run, Work
from benchmarks.echo.simulated import Plan, paper_profile, simulate
from tandem.bench.workload import PlannedRequest
from tandem.core.slo import Slo
from tandem.estimators.latency import Rates

BLOCK = 16
LIMITS = Limits(document_tokens=400, output_tokens=8, scale=0.1, documents=6)


def encode(text: str) -> list[int]:
    """Words are numbered by their letters."""
    return [sum(map(ord, word)) % 997 + 1 for word in text.split()]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three articles with two questions each, one meeting, and a trace of one hour."""
    names = ("alpha", "beta", "gamma")
    articles = [
        {
            "title": name,
            "input": " ".join(f"{name}{place}" for place in range(300)),
            "qa_pairs": str([{"Q": f"who is {name} {k}", "A": "a b c"} for k in range(2)]),
        }
        for name in names
    ]
    query = {"query": "what was decided", "answer": "nothing " * 50}
    said = [{"speaker": "A", "content": " ".join(f"m{place}" for place in range(500))}]
    meeting = {
        "general_query_list": [query],
        "specific_query_list": [query],
        "meeting_transcripts": said,
    }
    rows = "".join(
        f"2023-11-16 18:{at // 60:02d}:{at % 60:02d}.0000000,10,10\n" for at in range(0, 3600, 4)
    )
    texts = {
        "prefix/loogle_shortdep_qa.jsonl.gz": "\n".join(map(json.dumps, articles)),
        "prefix/qmsum_val.jsonl.gz": json.dumps(meeting),
        str(online.TRACE): f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    return tmp_path


def plan_of(data: Path, blocks: int = 80, seconds: float = 20.0) -> Plan:
    """An engine whose memory holds about three of six documents."""
    profile = paper_profile()
    info = replace(profile.info, num_blocks=blocks, max_model_len=blocks * BLOCK)
    found = replace(profile, info=info)
    return Plan(data, found, seconds, Slo(1.0, 0.05), LIMITS, 32, 256, 0.9, 10.0)


def test_documents_begin_differently_and_are_cut() -> None:
    streams = [list(range(1000)), list(range(1000, 1600))]
    found = documents(streams, 9, 300)
    assert {len(each) for each in found} == {300}
    assert len({each[:BLOCK] for each in found}) == 9
    assert found[0] == tuple(range(300)) and set(found[1]) <= set(streams[1])
    last = documents(streams, 9, 5000)[8]  # begun late, continued at its own beginning
    assert sorted(last) == streams[0] and last[0] != 0


def test_questions_about_a_document_share_it_and_nothing_else(data: Path) -> None:
    found = pool("loogle-short", data, encode, LIMITS, 1000)
    assert len(found) == round(1951 * 6 / 105)
    beginnings = Counter(each.prompt[:300] for each in found)
    assert len(beginnings) == 6 and min(beginnings.values()) >= 18
    assert len({each.prompt[:BLOCK] for each in found}) == 6
    assert len({each.prompt for each in found}) == len(found)
    assert {each.sampling.max_tokens for each in found} == {3}
    neighbours = sum(one.prompt[:300] == two.prompt[:300] for one, two in pairwise(found))
    assert neighbours < len(found) / 3  # shuffled
    assert found == pool("loogle-short", data, encode, LIMITS, 1000)


def test_answers_and_chats_are_bounded(data: Path) -> None:
    meetings = pool("qmsum", data, encode, LIMITS, 1000)
    assert {each.sampling.max_tokens for each in meetings} == {8}
    assert max(len(each.prompt) for each in meetings) < 400 + 20
    talks = chats(2000, 1.0, 1000)
    assert 130 < sum(len(prompt) for prompt, _ in talks) / 2000 < 190
    assert max(output for _, output in talks) <= 2048
    assert len({prompt[:BLOCK] for prompt, _ in talks}) == 2000


def test_the_rate_is_the_highest_that_attains() -> None:
    def load_at(rate: float) -> online.Load:
        return [PlannedRequest(n, n / rate, (1,), 1) for n in range(round(100 * rate))]

    def attained(load: online.Load) -> float:
        assert max(each.at_s for each in load) < 10.0  # the busiest seconds only
        return 1.0 if len(load) <= 55 else 0.2

    for first in (1.0, 64.0):
        rate, tried = online.highest_rate(attained, load_at, wanted=0.9, peak_s=10.0, first=first)
        assert 5.0 < rate <= 5.55 and tried[rate] == 1.0


def test_options_of_a_policy_that_is_no_variant() -> None:
    assert list(chosen(None)) == ["BS", "BS+E", "BS+E+S", "Echo", "unified"]
    found = chosen(["BS", "mace:a=1,b=x"])
    assert found == {"BS": VARIANTS["BS"], "mace:a=1,b=x": Variant("mace", {"a": "1", "b": "x"})}


@pytest.fixture
def runs(data: Path) -> list[Run]:
    """BS, Echo and `unified` beside a few online requests."""
    plan = plan_of(data)
    work = Work(
        "loogle-short",
        plan.load_at(2.0),
        pool("loogle-short", data, encode, LIMITS, plan.vocabulary),
        plan.seconds,
        plan.slo,
    )
    return [simulate(plan, name, VARIANTS[name], work) for name in ("BS", "Echo", "unified")]


def test_figures_add_up(runs: list[Run]) -> None:
    for run in runs:
        assert run.offline_requests == 111 and run.emptied and 0.0 < run.seconds < 20.0
        assert run.online_requests > 20 and run.attainment <= min(run.ttft_met, run.tpot_met)
        assert sum(each.finished_tokens for each in run.bins) == run.offline_tokens
        prompts = sum(each.prompt_tokens for each in run.bins)
        cached = sum(each.cached_tokens for each in run.bins)
        assert run.hit_share == pytest.approx(cached / prompts)
        assert run.tokens_s == pytest.approx(run.offline_tokens / run.seconds)
        assert len(run.ttft_s) == 101 and run.ttft_s == sorted(run.ttft_s)
        for each in run.samples:
            held, cached = each.held_online + each.held_offline, each.cached_read
            assert held + cached + each.cached_online + each.cached_rest + each.free == 80
            assert min(each.held_offline, each.cached_rest, each.demand) >= 0
        assert any(each.offline for each in run.samples)
        assert any(each.online and each.held_online for each in run.samples)
    base, echo, _ = runs
    assert echo.hit_share > base.hit_share + 0.1  # what the study is there to show


def test_what_had_no_time_to_end_does_not_count(data: Path) -> None:
    plan = plan_of(data, seconds=4.0)
    load = [PlannedRequest(0, 0.0, (1, 2), 4), PlannedRequest(1, 3.9, (1, 3), 900)]
    run = simulate(plan, "fcfs", Variant("fcfs"), Work("", load, [], 4.0, plan.slo))
    assert (run.online_requests, run.attainment, run.emptied) == (1, 1.0, False)


def test_what_is_late_counts_though_it_has_not_ended(data: Path) -> None:
    """With answers too long for the run, and far more requests than places."""
    plan = plan_of(data, seconds=4.0)
    load = [PlannedRequest(number, 0.0, (number, 2), 900) for number in range(64)]
    work = Work("", load, [], 4.0, Slo(1.0, 0.05))
    run = simulate(plan, "fcfs", Variant("fcfs"), work)
    assert (run.online_requests, run.ttft_met) == (64, 0.5)
    slow = replace(work, slo=Slo(1.0, 0.001))
    assert simulate(plan, "fcfs", Variant("fcfs"), slow).tpot_met == 0.0


def setup_of(stem: str = "echo-test") -> Setup:
    return Setup(
        stem, "Title", "Where.", {}, 2.0, {"2.00": 0.95}, (1.0, 0.05), 0.9, 80, BLOCK, 20.0, 1,
        1.5, {},
    )  # fmt: skip


def test_the_page_judges_the_goals(runs: list[Run]) -> None:
    found = rows(runs)
    assert found[0].speedup == 1.0
    assert found[1].speedup == pytest.approx(runs[1].tokens_s / runs[0].tokens_s)
    judged = goals(setup_of(), found)
    assert len(judged) == 4
    assert judged[0][2] == (found[1].speedup >= 1.5)
    assert judged[1][2] == (runs[2].tokens_s >= runs[1].tokens_s)
    page = as_page(setup_of(), runs)
    assert page.startswith("# Title\n") and page.count("\n| Echo |") == 1
    assert f"| {found[1].speedup:.2f} |" in page
    assert not goals(setup_of(), found[:1])  # of one policy there is nothing to judge


@pytest.mark.full
def test_one_command_leaves_everything(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "encoder", lambda data: encode)
    app = typer.Typer()
    app.command()(command.main)
    flags = ["--data", str(data), "--out", str(tmp_path / "out"), "--rate", "2"]
    flags += ["--minutes", "0.1", "--documents", "4", "--document-tokens", "400"]
    flags += ["--policy", "BS", "--policy", "Echo", "--dataset", "loogle-short"]
    result = CliRunner().invoke(app, [*flags, "--dataset", "sharegpt"])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "out" / "echo-a100-40g.json").read_text())
    assert [(row["dataset"], row["policy"]) for row in content["rows"]] == [
        (dataset, policy) for dataset in ("loogle-short", "sharegpt") for policy in ("BS", "Echo")
    ]
    page = (tmp_path / "out" / "echo-a100-40g.md").read_text()
    assert page in result.output and "LooGLE short QA: 74 requests" in page
    names = {"speedup", "latency", "active", "hits", "memory", "demand"}
    assert {path.stem for path in (tmp_path / "out").glob("*.svg")} == {
        f"echo-a100-40g-{name}" for name in names
    }
    assert all(f"(echo-a100-40g-{name}.png)" in page for name in names)


@pytest.mark.parametrize("main", [command.main, measured.main])
def test_without_shared_data_nothing_is_run(main, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--data", str(tmp_path)])
    assert "skipped: no shared data" in str(result.exception or result.output)


def test_the_engine_runs_in_turns(data: Path) -> None:
    """With the demo model, whose memory holds what was asked for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    executor, settings = measured.loaded("demo", 1024, 8)
    assert executor.info.num_blocks == 64
    rates = Rates.guess_for(executor.info)
    profile = replace(paper_profile(), info=executor.info, rates=rates)
    limits = Limits(document_tokens=100, output_tokens=4, scale=0.05, documents=2)
    plan = Plan(data, profile, 0.5, Slo(1.0, 0.05), limits, 8, 64, 0.9, 10.0)
    variants = chosen(["BS", "unified"])
    said: list[str] = []
    study = measured.Study(plan, executor, settings, variants, ["qmsum"], 2, said.append)
    pools = {"qmsum": plan.pool("qmsum", encode)}
    found = list(study.runs(plan.load_at(8.0), pools))
    torch.set_num_threads(threads)
    assert [(run.policy, run.round) for run in found] == [
        ("BS", 0), ("unified", 0), ("unified", 1), ("BS", 1)
    ]  # fmt: skip
    assert all(run.iterations and run.samples for run in found)  # however busy the machine
    assert rows(found)[0].policy == "BS" and len(rows(found)) == 2
