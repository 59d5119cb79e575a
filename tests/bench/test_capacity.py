"""`tandem plan`: the fewest replicas that hold, and what they leave over."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem.bench.capacity import Run, fewest, peak, plan_capacity, share
from tandem.bench.measure import summarise
from tandem.bench.offline import again, endless, read_batch
from tandem.bench.workload import PlannedRequest
from tandem.cli import app
from tandem.cli.plan import Replica
from tandem.config import resolve
from tandem.core.errors import InvalidRequest
from tandem.core.slo import WorkClass

NOTHING = summarise([])


def load(*times_s: float, tokens: int = 10) -> list[PlannedRequest]:
    return [PlannedRequest(n, at_s, (1,) * tokens, 5) for n, at_s in enumerate(times_s)]


def test_the_busiest_window_has_the_most_tokens_and_begins_at_zero() -> None:
    few = load(0.0, 1.0, 2.0, 3.0)
    large = [PlannedRequest(9, 50.0, (1,) * 500, 5), PlannedRequest(10, 55.0, (1,), 5)]
    assert [each.at_s for each in peak([*few, *large], 10.0)] == [0.0, 5.0]
    assert [each.at_s for each in peak([*few, *large], 1000.0)] == [0.0, 1.0, 2.0, 3.0, 50.0, 55.0]
    assert len(peak(load(0.0, 10.0, 20.0), 10.0)) == 1  # the window's end is not in it


def test_replicas_take_turns() -> None:
    assert [each.index for each in share(load(0, 1, 2, 3, 4), 2)] == [0, 2, 4]


@pytest.mark.parametrize("needed", range(1, 21))
def test_the_fewest_that_hold_are_found_in_few_trials(needed: int) -> None:
    tried: list[int] = []

    def holds(number: int) -> bool:
        tried.append(number)
        return number >= needed

    assert fewest(holds, 20) == needed
    assert len(tried) == len(set(tried)) <= 10
    assert needed == 1 or needed - 1 in tried


def test_none_is_found_where_none_holds() -> None:
    assert fewest(lambda number: False, 6) is None


def test_a_plan_tries_the_peak_and_then_the_whole_load() -> None:
    runs: list[tuple[int, float, str]] = []

    def simulate(requests: Sequence[PlannedRequest], *, beside: str = "") -> Run:
        runs.append((len(requests), requests[-1].at_s, beside))
        rate = {"offline": 7.0, "training": 9.0}.get(beside, 0.0)
        return Run(1.0 if len(requests) <= 3 else 0.5, NOTHING, rate, rate)

    requests = load(*range(10), *(20 + n / 10 for n in range(9)))
    plan = plan_capacity("one", requests, simulate, peak_s=5.0, attainment=0.9, most=8)
    assert plan.replicas == 3 and plan.tried == ((1, 0.5), (2, 0.5), (3, 1.0), (4, 1.0))
    assert (plan.offline.offline_tokens_s, plan.training.training_tokens_s) == (7.0, 9.0)
    assert [beside for _, _, beside in runs[-2:]] == ["offline", "training"]
    assert runs[-1][0] == len(requests[::3])
    with pytest.raises(InvalidRequest, match=r"2 replicas of one are not enough: at best 50\.0%"):
        plan_capacity("one", requests, simulate, peak_s=5.0, attainment=0.9, most=2)


def test_lines_of_a_batch_share_what_they_share(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    text = "The same long document, and then some question. "
    bodies = [
        {"messages": [{"role": "user", "content": text + "Who?"}], "max_tokens": 7},
        {"messages": [{"role": "user", "content": text + "Where is it?"}]},
        {"prompt": [1, 2, 300], "max_completion_tokens": 3},
    ]
    path.write_text("\n".join(json.dumps({"custom_id": "a", "body": body}) for body in bodies))
    first, second, ids = read_batch(path, 256)
    pairs = zip(first.prompt, second.prompt, strict=False)
    same = next(place for place, (one, other) in enumerate(pairs) if one != other)
    assert 8 <= same < len(first.prompt) < len(second.prompt)
    assert [each.sampling.max_tokens for each in (first, second, ids)] == [7, 128, 3]
    assert ids.prompt == (1, 2, 44) and first.work_class is WorkClass.OFFLINE
    stream = again([first, ids])
    assert [next(stream).prompt for _ in range(3)] == [first.prompt, ids.prompt, first.prompt]
    stream = endless(4, 2, 256, 0)
    assert next(stream).prompt != next(stream).prompt


def test_lines_that_the_server_takes_are_simulated(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    parts = [{"type": "text", "text": "How are"}, {"type": "text", "text": " you?"}]
    call = {"role": "assistant", "content": None, "tool_calls": []}
    bodies = [
        {"messages": [{"role": "user", "content": parts}, call]},
        {"messages": [{"role": "user", "content": "How are you?"}, {"content": ""}]},
        {"prompt": ["How", " are"], "max_tokens": 0},
    ]
    lines = [json.dumps({"body": body}) for body in bodies]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode())
    first, second, third = read_batch(path, 256)
    assert first.prompt == second.prompt and len(third.prompt) == 2
    assert [each.sampling.max_tokens for each in (first, second, third)] == [128, 128, 1]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 of the batch .*: "),
        ('{"body": {}}', "line 2 .*neither 'prompt' nor 'messages'"),
        ('{"body": {"mesages": [{"content": "a"}]}}', "line 2 .*neither"),
        ('{"body": {"prompt": "a", "max_tokens": -1}}', "line 2 .*max_tokens"),
    ],
)
def test_a_line_that_cannot_be_simulated_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"body": {"prompt": "a"}}\n' + line)
    with pytest.raises(InvalidRequest, match=problem):
        read_batch(path, 256)


def test_the_command_says_how_many_and_what_is_left(tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "plan.json"
    busy = [f"2024-01-01 00:00:{n // 10:02d}.{n % 10}000000,2000,50" for n in range(100)]
    rows = [*busy, *(f"2024-01-01 00:00:{n}.0000000,200,20" for n in range(12, 40))]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    result = CliRunner(env={"COLUMNS": "120"}).invoke(
        app, ["plan", "--trace", str(trace), "--peak", "10", "--out", str(out), "--figures"]
    )
    assert result.exit_code == 0, result.output
    [plan] = json.loads(out.read_text())["plans"]
    assert plan["replicas"] > 1 and plan["peak"]["attainment"] >= 0.9
    tried = dict(map(tuple, plan["tried"]))
    assert tried[plan["replicas"] - 1] < 0.9
    assert plan["offline"]["offline_tokens_s"] > 0 and plan["training"]["training_tokens_s"] > 0
    assert plan["offline"]["attainment"] > 0.5
    assert {path.name for path in tmp_path.glob("plan.*")} == {"plan.json", "plan.png", "plan.svg"}
    assert "left for batches" in result.output


def test_a_batch_beside_a_simulated_load(tmp_path: Path) -> None:
    batch, out = tmp_path / "in.jsonl", tmp_path / "run.json"
    body = {"prompt": "word " * 50, "max_tokens": 8}
    batch.write_text("\n".join(json.dumps({"body": body}) for _ in range(300)))
    load = ["--rate", "4", "--max-requests", "8", "--prompt-tokens", "64", "--output-tokens", "8"]
    result = CliRunner().invoke(app, ["simulate", *load, "--batch", str(batch), "--out", str(out)])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert (report["summary"]["requests"], report["summary"]["completed"]) == (8, 8)
    assert (report["offline"]["requests"], report["offline"]["completed"]) == (300, 300)


def test_what_should_have_ended_and_did_not_counts_as_missed() -> None:
    """Beside other work a run ends with the trace. Under twice what a replica can do, requests that
    never get their turn are misses, not unknown."""
    settings = resolve({"scheduling": {"ttft_slo": 0.5, "tpot_slo": 0.05}}, environ={})
    replica = Replica("a100-40g:llama-3-8b", settings, None, 64, 8, Console(quiet=True))
    requests = [PlannedRequest(n, n / 20, (n + 1,) * 2000, 20) for n in range(200)]
    run = replica(requests, beside="offline")
    assert run.online.errors["unfinished"] > 50
    assert run.attainment < 0.5


def test_a_load_that_is_shorter_than_its_answers_counts() -> None:
    settings = resolve({"scheduling": {"ttft_slo": 1.0, "tpot_slo": 0.1}}, environ={})
    replica = Replica("a100-40g:llama-3-8b", settings, None, 64, 8, Console(quiet=True))
    requests = [PlannedRequest(n, n / 5, (n + 1,) * 50, 200) for n in range(10)]
    alone, beside = replica(requests), replica(requests, beside="offline")
    assert (alone.online.requests, alone.online.completed, alone.attainment) == (10, 10, 1.0)
    assert beside.online.requests >= 1


def test_lines_that_cannot_run_are_told_instead_of_simulated(tmp_path: Path) -> None:
    """The model's context is 8192 tokens. The stream has no end: none may be refused for ever."""
    settings, path, told = resolve({}, environ={}), tmp_path / "in.jsonl", io.StringIO()
    long, short = ({"body": {"prompt": [1] * count, "max_tokens": 4}} for count in (9000, 50))
    path.write_text(json.dumps(long))
    requests = [PlannedRequest(n, n / 5, (n + 1,) * 50, 4) for n in range(5)]
    for batch, tokens in ((path, 64), (None, 9000)):
        replica = Replica("a100-40g:llama-3-8b", settings, batch, tokens, 8, Console(quiet=True))
        with pytest.raises(InvalidRequest, match="offline-0 cannot run"):
            replica(requests, beside="offline")
    path.write_text(f"{json.dumps(long)}\n{json.dumps(short)}")
    console = Console(file=told, width=200)
    replica = Replica("a100-40g:llama-3-8b", settings, path, 64, 8, console)
    assert replica(requests, beside="offline").offline_tokens_s > 0
    assert "1 of 2 offline requests are left out; offline-0 cannot run" in told.getvalue()
