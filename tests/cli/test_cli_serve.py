"""`tandem serve`: what it says once it is ready, its end on a second signal, and its errors.

`tests/test_survival.py` drains it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

import tandem.cli
from patience import PATIENCE_S, START_S, eventually
from tandem.api.protocol import PatientProtocol
from tandem.cli.serve import http_config

SERVE = [sys.executable, "-c", "from tandem.cli import main; main()", "serve", "demo"]
FLAGS = ["--port", "0", "--threads", "1", "--accustom", "0", "--kv-memory", "64MiB"]
FLAGS += ["--api-key", "sk-test"]
HEADERS = {"Authorization": "Bearer sk-test"}


class Server:
    """A running `tandem serve` and what it printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._ready_url()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def _ready_url(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in list(self.lines):
                if match := re.search(r"ready on (http://\S+)", line):
                    return match[1]
            time.sleep(0.05)
        raise AssertionError(f"the server did not get ready:\n{''.join(self.lines)}")


@contextmanager
def serving() -> Iterator[Server]:
    """A server that is surely gone afterwards."""
    with TemporaryDirectory() as state:
        command = [*SERVE, *FLAGS, "--store-directory", state]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            yield Server(process)
        finally:
            process.kill()
            process.wait(timeout=PATIENCE_S)
            if process.stderr is not None:
                process.stderr.close()


def stream(http: httpx.Client, tokens: int) -> Iterator[str]:
    body = {
        "model": "demo",
        "prompt": "Hello",
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        yield from (line for line in response.iter_lines() if line)


def test_the_second_signal_ends_at_once_and_takes_the_engine_along() -> None:
    with serving() as server, httpx.Client(base_url=server.url, headers=HEADERS) as http:
        assert any("curl" in line and server.url in line for line in server.lines)
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        lines = stream(http, 2000)
        next(lines)
        children = children_of(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: any("draining" in line for line in server.lines))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=PATIENCE_S) == 1
        with pytest.raises(httpx.HTTPError):
            list(lines)
        eventually(lambda: not any(alive(child) for child in children))


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "{taken}"], "--port"),
        (["--log-level", "chatty"], "log_level"),
        (["--config", "/does/not/exist.toml"], "configuration file"),
        (["--api-key-file", "/does/not/exist"], "API key file"),
        (["--policy", "no-such-policy"], "no-such-policy"),
        (["--max-batch-tokens", "0"], "--max-batch-tokens"),
        (["--threads", "-1"], "--threads"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_started_says_why(flags: list[str], message: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [flag.format(taken=port) for flag in flags]
        base = ["--store-directory", str(tmp_path)]
        base += [] if "--port" in flags else ["--port", "0"]
        result = CliRunner().invoke(tandem.cli.app, ["serve", "demo", *base, *given])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_clients_that_do_not_keep_their_part_are_not_waited_for() -> None:
    """What its tests serve with is what a server serves with."""
    config = http_config(FastAPI())
    assert config.http is PatientProtocol and config.lifespan == "off"
    config.load()
    assert config.http_protocol_class is PatientProtocol


def test_a_model_directory_that_is_missing_is_named() -> None:
    result = CliRunner().invoke(tandem.cli.app, ["serve", "./no-such-dir"])
    assert result.exit_code == 2, result.output
    assert "there is no directory './no-such-dir'" in result.stderr


def test_a_mistake_that_the_engine_finds_is_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [*FLAGS, "--kv-memory", "1", "--store-directory", str(tmp_path)]
    done = CliRunner().invoke(tandem.cli.app, ["serve", "demo", *flags])
    assert done.exit_code == 2, done.output
    assert "error:" in done.stderr and "memory" in done.stderr
    told = done.stderr + capfd.readouterr().err  # by the engine, too
    assert "Traceback" not in told and "unexpectedly" not in told


def test_a_canary_file_that_does_not_fit_the_model_is_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    canary = tmp_path / "canary.jsonl"
    canary.write_text('{"prompt": "Once"}\n{"prompt": "%s"}\n' % ("word " * 5000))
    flags = [*FLAGS, "--store-directory", str(tmp_path / "state"), "--canary-file", str(canary)]
    done = CliRunner().invoke(tandem.cli.app, ["serve", "demo", *flags])
    assert done.exit_code == 2, done.output
    assert "error: learning.canary_file: cannot use" in done.stderr and "line 2" in done.stderr
    assert "ready on" not in done.stderr
    assert "Traceback" not in done.stderr + capfd.readouterr().err
