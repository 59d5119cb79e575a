"""`tandem adapters` and `tandem finetune` against a whole server over the scripted engine."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from fake_engine import FakeEngine
from learning_world import CANARY
from serving import live
from tandem.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from tandem.build_app import build_app
from tandem.cli import app
from tandem.cli.adapters_watch import follow, held_out
from tandem.cli.finetune import _watch
from tandem.cli.remote import Remote, Unreachable, base_url, connected
from tandem.config import AdapterConfig, LearningConfig, Settings, StoreConfig

RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    canary = tmp_path / "canary.jsonl"
    canary.write_text(CANARY)
    folder = tmp_path / "roots" / "given"
    folder.mkdir(parents=True)
    (folder / CONFIG_NAME).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (folder / WEIGHTS_NAME).write_bytes(b"weights")
    settings = Settings(
        store=StoreConfig(directory=str(tmp_path / "state")),
        learning=LearningConfig(canary_file=str(canary), version_wait_s=0.5),
        adapters=AdapterConfig(roots=(str(tmp_path / "roots"),)),
    )
    with live(build_app(settings, FakeEngine())) as address:
        yield f"{address}/v1"


def run(url: str, *words: str) -> Result:
    return RUNNER.invoke(app, [*words, "--url", url])


def test_adapters_from_the_command_line(url: str, tmp_path: Path) -> None:
    made = run(url, "adapters", "create", "formal", "--set", "rank=4", "--set", "gate=manual")
    assert made.exit_code == 0 and "'rank': 4" in made.output, made.output
    assert "formal@1 answers now" in run(url, "adapters", "import", "formal", "given").output
    assert "formal@2 answers now" in run(url, "adapters", "import", "formal", "given").output
    listed = run(url.removesuffix("/v1"), "adapters", "list").output
    assert "demo:formal" in listed and "formal@2" in listed and "manual" in listed
    versions = run(url, "adapters", "versions", "formal").output
    assert "2 *" in versions and "import" in versions
    for words in (("1",), ("--version", "1"), ("1", "--version", "1")):
        assert "formal@1 answers now" in run(url, "adapters", "rollback", "formal", *words).output
    assert run(url, "adapters", "rollback", "formal", "1", "--version", "2").exit_code == 2
    assert "formal@2 answers now" in run(url, "adapters", "publish", "formal", "2").output
    curves = run(url, "adapters", "curves", "formal", "--out", str(tmp_path / "curves"))
    assert curves.exit_code == 0 and "2 versions" in curves.output
    assert len((tmp_path / "curves" / "formal.jsonl").read_text().splitlines()) == 2
    target = tmp_path / "out.zip"
    exported = run(url, "adapters", "export", "formal", "2", "--out", str(target))
    assert exported.exit_code == 0 and target.stat().st_size > 0
    current = tmp_path / "current.zip"
    assert run(url, "adapters", "export", "formal", "--out", str(current)).exit_code == 0
    assert current.read_bytes() == target.read_bytes()
    run(url, "adapters", "create", "unlearned")
    nothing = run(url, "adapters", "export", "unlearned", "--out", str(tmp_path / "no.zip"))
    assert nothing.exit_code == 1 and "no current version" in nothing.output
    assert not (tmp_path / "no.zip").exists()
    assert "rolled back from version 2 to 1" in run(url, "adapters", "events", "formal").output
    one = ("adapters", "delete", "formal")
    refused = run(url, *one, "2")
    assert refused.exit_code == 1 and "answers" in refused.output
    assert "formal@1 is gone" in run(url, *one, "1").output
    assert "has no version 1" in run(url, *one, "1").output
    assert "formal is gone" in run(url, "adapters", "delete", "formal").output
    gone = run(url, "adapters", "versions", "formal")
    assert gone.exit_code == 1 and "there is no adapter 'formal'" in gone.output


def test_what_is_empty_says_so_and_times_are_readable(url: str) -> None:
    assert "no adapters yet" in run(url, "adapters", "list").output
    run(url, "adapters", "create", "formal")
    assert "nothing has happened yet" in run(url, "adapters", "events", "formal").output
    versions = run(url, "adapters", "versions", "formal").output
    assert "no versions yet: base answers; samples: 0 new, 0 in training" in versions
    run(url, "adapters", "import", "formal", "given")
    today = datetime.now().strftime("%Y-%m-%d ")
    for command in ("events", "versions"):
        assert today in run(url, "adapters", command, "formal").output


def test_every_state_of_samples_is_listed(url: str) -> None:
    body = {"adapter": "formal", "prompt": "Hi", "preference": {"chosen": "a", "rejected": "b"}}
    for number in range(3):
        httpx.post(f"{url}/feedback", json=body | {"prompt": f"Hi {number}"}).raise_for_status()
    listed = run(url, "adapters", "list").output
    head, row = listed.splitlines()
    names = "model answers gate new in training consumed refused invalid held out"
    assert " ".join(head.split()) == names
    states = httpx.get(f"{url}/adapters/formal").json()["learning"]["samples"]
    assert (
        sum(map(int, row.split()[3:])) == sum(sum(each.values()) for each in states.values()) == 3
    )


class Page:
    """A server that answers what it is told to, one state of the world after the other."""

    def __init__(self, worlds: list[dict[str, object] | Unreachable]) -> None:
        self._worlds = worlds

    def turn(self, _: float) -> None:
        del self._worlds[0]
        if not self._worlds:
            raise KeyboardInterrupt

    def get(self, path: str, limit: int = 20, before: int | None = None) -> dict[str, object]:
        world = self._worlds[0]
        if isinstance(world, Unreachable):
            raise world
        if not path.endswith("events"):
            return world
        events = [each for each in world["events"] if before is None or each["id"] < before]
        return {"data": events[:limit], "has_more": len(events) > limit}

    def metrics(self) -> str:
        world = self._worlds[0]
        assert isinstance(world, dict)
        count = (
            f'tandem_learning_steps_total{{adapter="formal",outcome="applied"}} {world["steps"]}'
        )
        other = 'tandem_learning_steps_total{adapter="other",outcome="applied"} 9.0'
        return f'{other}\n{count}\ntandem_learning_loss{{adapter="formal"}} 0.25\n'


def test_learning_is_followed_line_by_line_across_a_restart() -> None:
    def event(number: int, message: str, level: str = "info") -> dict[str, object]:
        return {"id": number, "created_at": 0, "level": level, "message": message}

    def world(
        steps: float, label: str, train: dict[str, int], *events: object
    ) -> dict[str, object]:
        samples = {"train": train, "held_out": {"accepted": 2}}
        return {
            "label": label,
            "learning": {"samples": samples},
            "steps": steps,
            "events": list(events[::-1]),
        }

    made, refused = event(1, "made"), event(2, "version 1 refused: noise", "warning")
    training = world(0.0, "base", {"accepted": 8, "assigned": 32}, made)
    later = world(4.0, "base", {"accepted": 8, "assigned": 32}, made)
    ended = world(4.0, "base", {"accepted": 8, "refused": 32}, made, refused)
    page = Page([training, training, later, Unreachable("gone"), Unreachable("gone"), ended])
    lines = []
    with pytest.raises(KeyboardInterrupt):
        for line in follow(page, "formal", page.turn, lambda: 0.0):  # type: ignore[arg-type]
            lines.append(line.split(" ", 2)[2])
    assert lines == [
        "made",
        "base answers; samples: 8 new, 32 in training, 2 held out",
        "4 steps, loss 0.2500",
        "gone; trying again",
        "warning: version 1 refused: noise",
        "base answers; samples: 8 new, 0 in training, 32 refused, 2 held out",
    ]


def test_no_event_is_lost_however_many_come_at_once() -> None:
    def world(*numbers: int) -> dict[str, object]:
        events = [
            {"id": number, "created_at": 0, "level": "info", "message": f"event {number}"}
            for number in reversed(numbers)
        ]
        return {"label": "base", "learning": None, "steps": 0.0, "events": events}

    page = Page([world(), world(*range(1, 260))])
    lines = []
    with pytest.raises(KeyboardInterrupt):
        for line in follow(page, "formal", page.turn, lambda: 0.0):  # type: ignore[arg-type]
            lines.append(line.split(" ", 2)[2])
    assert lines[1:] == [f"event {number}" for number in range(1, 260)]


def test_samples_that_versions_are_measured_on_are_the_accepted_ones() -> None:
    samples = {"held_out": {"accepted": 2, "invalid": 3}}
    assert held_out({"learning": {"samples": samples}}) == 2


def test_metrics_are_read_from_a_server(url: str) -> None:
    with connected(url, "") as server:
        assert "tandem_learning_steps_total" in server.metrics()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8103", "http://127.0.0.1:8103/v1"),
        ("localhost", "http://localhost/v1"),
        ("https://host/api/", "https://host/api/"),
        ("http://[::1]:80", "http://[::1]:80/v1"),
    ],
)
def test_addresses_need_no_scheme(given: str, meant: str) -> None:
    assert base_url(given) == meant


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://[bad", ""])
def test_what_is_no_address_is_a_wrong_option(url: str) -> None:
    for words in (["adapters", "list"], ["chat"]):
        failed = RUNNER.invoke(app, [*words, f"--url={url}"])
        assert failed.exit_code == 2 and "--url" in failed.output, failed.output


def test_the_address_may_be_a_variable(url: str) -> None:
    bare = url.removeprefix("http://").removesuffix("/v1")
    listed = RUNNER.invoke(app, ["adapters", "list"], env={"TANDEM_URL": bare})
    assert listed.exit_code == 0 and "no adapters yet" in listed.output, listed.output


def test_a_method_that_is_none_is_a_wrong_option(url: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("{}")
    failed = run(
        url, "finetune", "create", str(tmp_path / "x.jsonl"), "--model", "demo", "--method", "lora"
    )
    assert failed.exit_code == 2 and "supervised" in failed.output and "kto" in failed.output


def test_a_job_is_watched_across_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def metrics(step: int) -> dict[str, object]:
        message = f"Step {step}/20: training loss=0.5"
        data = {"train_loss": 0.5}
        return {"id": f"e{step}", "type": "metrics", "message": message, "data": data}

    def job(status: str, *steps: int) -> dict[str, object]:
        events = {"data": [metrics(step) for step in steps], "has_more": False}
        return {"status": status, "events": events, "error": None, "fine_tuned_model": "demo:x"}

    running, done = job("running", 7), job("succeeded", 20, 7)
    worlds = [running, Unreachable("gone"), Unreachable("gone"), done]

    class Jobs:
        def get(self, path: str, **_: object) -> object:
            world = worlds[0]
            if isinstance(world, Unreachable):
                raise world
            return world["events"] if path.endswith("events") else world

    monkeypatch.setattr("tandem.cli.finetune.time.sleep", lambda _: worlds.pop(0))
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    assert _watch(Jobs(), "job", console) == 0  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert shown.count("gone; waiting") == 1 and "demo:x is ready" in shown
    assert "20/20" in shown and "0/?" not in shown
    worlds[:] = [running]
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("tandem.cli.finetune.time.sleep", interrupted)
    with pytest.raises(typer.Exit):
        _watch(Jobs(), "job", console)  # type: ignore[arg-type]
    assert "see it again: tandem finetune watch job" in console.file.getvalue()


def test_a_server_that_is_not_there_is_one_line() -> None:
    failed = run("http://127.0.0.1:9/v1", "adapters", "list")
    assert failed.exit_code == 1 and "error: cannot reach" in failed.output


def test_a_wrong_setting_is_refused(url: str) -> None:
    assert run(url, "adapters", "create", "formal", "--set", "rank").exit_code == 2
    refused = run(url, "adapters", "create", "formal", "--set", "speed=1")
    assert refused.exit_code == 1 and "there is no setting 'speed'" in refused.output


def test_a_job_is_watched_to_its_end(url: str, tmp_path: Path) -> None:
    examples = tmp_path / "train.jsonl"
    lines = [
        {"prompt": f"Number {n}:", "completion": f" {n}", "label": n % 2 == 0} for n in range(6)
    ]
    examples.write_text("\n".join(json.dumps(line) for line in lines))
    done = run(
        url, "finetune", "create", str(examples), "--model", "demo", "--method", "kto",
        "--suffix", "numbers", "--epochs", "1", "--batch-size", "2", "--seed", "0",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (job,) = httpx.get(f"{url}/fine_tuning/jobs").json()["data"]
    assert job["seed"] == 0
    assert "is ready" in done.output and "succeeded" in done.output
    job_id = done.output.split()[0]
    assert job_id in run(url, "finetune", "list").output
    events = run(url, "finetune", "events", job_id).output
    assert events.index("Step 1/3") < events.index("Step 3/3")
    cancelled = run(url, "finetune", "cancel", job_id)
    assert cancelled.exit_code == 1 and "cannot be cancelled" in cancelled.output
    lines.append({"prompt": "x"})
    examples.write_text("\n".join(json.dumps(line) for line in lines))
    failed = run(url, "finetune", "create", str(examples), "--model", "demo", "--method", "kto")
    assert failed.exit_code == 1 and "line 7" in failed.output


def test_versions_say_what_was_measured_and_why_they_were_refused(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(number: int, state: str, reason: str, **metrics: float) -> dict[str, object]:
        made = {"version": number, "state": state, "current": False, "created_at": 0}
        return {**made, "parent": 0, "origin": "feedback", "metrics": metrics, "reason": reason}

    refused = version(2, "refused", "9 of 36 answers are broken", answers_read=36, broken_answers=9)
    listed = [version(1, "published", "", kept=0.523), refused]
    monkeypatch.setattr(Remote, "get", lambda self, path: {"data": listed})
    shown = run(url, "adapters", "versions", "formal").output
    table, _, below = shown.partition("version 2 refused: 9 of 36 answers are broken\n")
    assert "version 1: kept 0.523\nversion 2: answers read 36, broken answers 9\n" in table
    assert "version 1 published:" not in shown
    assert below.startswith("refused: docs/troubleshooting.md says what each reason means")
