"""`tandem batch` against a server over the scripted engine, and with one of its own."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from fake_engine import FakeEngine, Script
from serving import live, make_app
from tandem.cli import app, batch
from tandem.cli.remote import Remote
from tandem.core.request import Request

RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def url() -> Iterator[str]:
    with live(make_app(FakeEngine(lambda request, index: Script(delay_s=0.001)))) as url:
        yield url


def run(*arguments: str) -> Result:
    return RUNNER.invoke(app, ["batch", *arguments])


def requests(folder: Path, count: int = 5, **body: Any) -> Path:
    path = folder / "in.jsonl"
    asked = {"model": "demo", "prompt": "Rivers:", "max_tokens": 2} | body
    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": asked}
        for n in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_a_file_is_answered(url: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    result = run("run", str(requests(tmp_path)), "-o", str(out), "--url", url)
    assert result.exit_code == 0, result.output
    assert ids(out) == ["r0", "r1", "r2", "r3", "r4"]
    assert "completed: 5 of 5 lines have an answer" in result.output
    assert not (tmp_path / "new" / "out.errors.jsonl").exists()
    listed = run("list", "--url", url)
    assert "completed" in listed.output and "5/5" in listed.output
    [batch_id] = [word for word in listed.output.split() if word.startswith("batch_")]
    again = tmp_path / "again.jsonl"
    assert run("watch", batch_id, "-o", str(again), "--url", url).exit_code == 0
    assert again.read_text() == out.read_text()
    refused = run("cancel", batch_id, "--url", url)
    assert refused.exit_code == 1 and "cannot be cancelled" in refused.output


def test_lines_without_an_answer_are_written_beside(url: str, tmp_path: Path) -> None:
    result = run("run", str(requests(tmp_path, temperature=9)), "--url", url)
    assert result.exit_code == 1
    assert ids(tmp_path / "in.output.errors.jsonl") == ["r0", "r1", "r2", "r3", "r4"]
    assert not (tmp_path / "in.output.jsonl").exists()


def test_a_file_that_is_none_is_told_by_its_lines(url: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n[")
    result = run("run", str(path), "--url", url)
    assert result.exit_code == 1 and "line 2: it is not valid JSON" in result.output
    missing = run("run", str(tmp_path / "none"), "--url", url)
    assert missing.exit_code == 2 and "cannot read" in missing.output


def test_files_that_cannot_be_used_are_refused_before_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_SERVE_MEANWHILE", "raise SystemExit(9)")
    given, pipe = requests(tmp_path), tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "in.output.jsonl").mkdir()
    (tmp_path / "out.errors.jsonl").mkdir()
    for words in ([given], [given, "-o", tmp_path / "out.jsonl"], [pipe]):
        refused = run("run", *map(str, words), "--serve", "demo")
        assert refused.exit_code == 2, refused.output
        assert refused.output.startswith("error: cannot ") and refused.output.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_is_not_written_over_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_SERVE_MEANWHILE", "raise SystemExit(9)")
    given, out = requests(tmp_path), tmp_path / "out.jsonl"
    before = given.read_text()
    for words in ([given, "-o", given], [given, "-o", out, "--errors", f"{tmp_path}/./out.jsonl"]):
        refused = run("run", *map(str, words), "--serve", "demo")
        assert refused.exit_code == 2 and "is named twice" in refused.output
    refused = run("watch", "batch_1", "-o", str(out), "--errors", str(out))
    assert refused.exit_code == 2 and "is named twice" in refused.output
    assert given.read_text() == before and not out.exists()
    thrown_away = ["-o", "/dev/null", "--errors", "/dev/null"]
    assert run("run", str(given), *thrown_away, "--serve", "demo").exit_code == 9


def test_files_of_a_run_before_do_not_stay(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    errors = tmp_path / "out.errors.jsonl"
    words = ["-o", str(out), "--url", url]
    run("run", str(requests(tmp_path, temperature=9)), *words)
    assert errors.exists() and not out.exists()
    run("run", str(requests(tmp_path)), *words)
    assert out.exists() and not errors.exists()
    (tmp_path / "in.jsonl").write_text("[")  # it fails as a whole, and has no answers to show
    run("run", str(tmp_path / "in.jsonl"), *words)
    assert ids(out) == ["r0", "r1", "r2", "r3", "r4"]


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interrupt_writes_what_its_own_server_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: BaseException
) -> None:
    """Its store goes with it."""
    out, looked = tmp_path / "out.jsonl", 0

    def play(request: Request, index: int) -> Script:
        return Script(delay_s=0.001 if len(engine.requests) <= 2 else 3600.0)

    engine = FakeEngine(play)
    whole = Remote.get

    def get(self: Remote, path: str, **query: Any) -> dict[str, Any]:
        nonlocal looked
        found = whole(self, path, **query)
        if path.startswith("batches/") and found["request_counts"]["completed"] == 2:
            looked += 1
            if looked == 1:
                raise reason
        return found

    monkeypatch.setattr(Remote, "get", get)
    with live(make_app(engine)) as url:
        monkeypatch.setattr(batch, "_server", lambda model, given, console: nullcontext(url))
        result = run("run", str(requests(tmp_path)), "-o", str(out), "--serve", "demo")
    assert result.exit_code == (130 if isinstance(reason, KeyboardInterrupt) else 143)
    assert len(ids(out)) == 2 and len(ids(tmp_path / "out.errors.jsonl")) == 3


def test_a_download_that_breaks_off_is_begun_again_and_leaves_the_old_file(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old")
    whole, seen = httpx.Response.iter_bytes, list[str]()

    def breaks_off(self: httpx.Response) -> Iterator[bytes]:
        yield from whole(self)
        if self.url.path.endswith("/content"):
            seen.append(out.read_text())
            if len(seen) == 1:
                raise httpx.ReadError("the server is away")

    monkeypatch.setattr(httpx.Response, "iter_bytes", breaks_off)
    result = run("run", str(requests(tmp_path)), "-o", str(out), "--url", url)
    assert result.exit_code == 0, result.output
    assert seen == ["old", "old"] and ids(out) == ["r0", "r1", "r2", "r3", "r4"]
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "out.jsonl"}


def test_answers_are_written_through_a_link_and_into_a_device(url: str, tmp_path: Path) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(tmp_path / "real.jsonl")
    assert run("run", str(requests(tmp_path)), "-o", str(link), "--url", url).exit_code == 0
    assert link.is_symlink() and len(ids(tmp_path / "real.jsonl")) == 5
    words = ["-o", "/dev/null", "--errors", str(tmp_path / "errors.jsonl"), "--url", url]
    assert run("run", str(requests(tmp_path)), *words).exit_code == 0
    assert Path("/dev/null").is_char_device()
    read, write = os.pipe()
    words = ["-o", f"/dev/fd/{write}", "--errors", str(tmp_path / "errors.jsonl"), "--url", url]
    assert run("run", str(requests(tmp_path)), *words).exit_code == 0
    os.close(write)
    with os.fdopen(read) as piped:
        assert len(piped.read().splitlines()) == 5


def test_an_interrupt_tells_the_command_that_goes_on(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Remote, path: str, **query: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    out, errors = tmp_path / "my answers.jsonl", tmp_path / "errors.jsonl"
    monkeypatch.setattr(Remote, "get", interrupted)
    words = ["-o", str(out), "--errors", str(errors), "--url", url]
    result = run("run", str(requests(tmp_path)), *words)
    assert result.exit_code == 130
    monkeypatch.undo()
    told = next(line for line in result.output.splitlines() if "tandem batch watch" in line)
    again = shlex.split(told.partition("tandem batch ")[2])
    assert run(*again).exit_code == 0
    assert len(ids(out)) == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_state_behind(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = "import sys, time; print('ready on http://h', file=sys.stderr, flush=True)"
    monkeypatch.setattr(batch, "_SERVE_MEANWHILE", f"{ready}; time.sleep(3600)")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[int] = []
    before = signal.signal(number, lambda number, _: seen.append(number))
    try:
        with pytest.raises(SystemExit) as ended, batch._server("demo", "", Console()):
            assert list(tmp_path.iterdir())
            os.kill(os.getpid(), number)
        assert ended.value.code == 128 + number
        assert not list(tmp_path.iterdir()) and not seen
        os.kill(os.getpid(), number)
        assert seen == [number]
    finally:
        signal.signal(number, before)


def test_an_engine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_SCHEDULING_ACCUSTOM_S", "0")
    monkeypatch.setenv("TANDEM_CACHE_MEMORY_BYTES", str(64 << 20))
    out = tmp_path / "out.jsonl"
    result = run("run", str(requests(tmp_path, 3)), "-o", str(out), "--serve", "demo")
    assert result.exit_code == 0, result.output
    assert ids(out) == ["r0", "r1", "r2"]
    broken = run("run", str(requests(tmp_path, 3)), "--serve", str(tmp_path / "none"))
    assert broken.exit_code == 2 and "there is no directory" in broken.output
    assert isinstance(broken.exception, SystemExit), broken.exception


def test_its_engine_does_not_outlive_the_command() -> None:
    """However the command ends: only the pipe to its server tells."""
    patched = "import time, tandem.cli; tandem.cli.main = lambda: time.sleep(120);"
    process = subprocess.Popen(
        [sys.executable, "-c", patched + batch._SERVE_MEANWHILE], stdin=subprocess.PIPE
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == -signal.SIGTERM


def test_a_signal_that_ended_the_server_is_named() -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    told = Console(file=io.StringIO())
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with process, pytest.raises(typer.Exit) as end:
        batch._address(process, told)
    assert end.value.exit_code == 1 and "ended by SIGKILL" in told.file.getvalue()
