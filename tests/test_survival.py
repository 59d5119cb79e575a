"""The shipped server under load: crowds that come and go, and an engine that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx
import psutil
import pytest

from patience import START_S, eventually
from tandem.bench.http1 import Origin
from tandem.bench.soak import SoakOptions, soak

SERVE = [sys.executable, "-c", "from tandem.cli import main; main()", "serve", "demo"]
FLAGS = ["--port", "0", "--accustom", "0", "--kv-memory", "128MiB", "--log-level", "warning",
         "--max-wait-factor", "0", "--drain", "120"]  # fmt: skip
SOAK_S = float(os.environ.get("TANDEM_SOAK_S", "5"))


class Server:
    """A `tandem serve demo` process."""

    def __init__(self, log: Path, *more: str) -> None:
        self.log = log
        with log.open("w") as output:
            flags = [*FLAGS, "--store-directory", str(log.with_name("state")), *more]
            self.process = subprocess.Popen([*SERVE, *flags], stderr=output, start_new_session=True)
        self.url = self._wait_ready()

    def _wait_ready(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if match := re.search(r"ready on (http://\S+)", self.log.read_text()):
                return match[1]
            time.sleep(0.1)
        raise AssertionError(f"the server did not get ready:\n{self.log.read_text()}")

    def engine_pid(self) -> int | None:
        """The living engine process, if there is one."""
        for child in psutil.Process(self.process.pid).children():
            try:
                if child.status() != psutil.STATUS_ZOMBIE and "tandem.build" in child.cmdline():
                    return child.pid
            except psutil.NoSuchProcess:
                continue
        return None


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """All that were started; the last one may be up."""
    started: list[Server] = []
    yield started
    for server in started:
        server.process.kill()
        server.process.wait(timeout=START_S)


@pytest.fixture
def server(servers: list[Server], tmp_path: Path) -> Server:
    """One that is up: the last one, unless a test ended it."""
    if not servers or servers[-1].process.poll() is not None:
        servers.append(Server(tmp_path / "serve.log"))
    return servers[-1]


def test_64_clients_come_and_go(server: Server) -> None:
    options = SoakOptions(
        Origin.parse(server.url),
        "demo",
        clients=64,
        seconds=SOAK_S,
        pids=(server.process.pid,),
        settle_s=START_S,
    )
    report = asyncio.run(soak(options))
    assert report.clean, (report.errors, report.held)
    assert report.completed > 40 and report.disconnected > 0


def test_kill_9_of_the_engine_under_load_and_sigterm(server: Server) -> None:
    with HealthWatch(server) as health:
        streams = [Stream(server.url) for _ in range(8)]
        eventually(lambda: all(stream.started for stream in streams), START_S)
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        for stream in streams:
            stream.thread.join(timeout=START_S)
            assert stream.error_event, "a client was not told"
        refused = httpx.post(f"{server.url}/v1/completions", json=COMPLETION)
        if time.monotonic() - killed_s < 1.0:  # sooner than an engine can start
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        eventually(lambda: answers(server.url), START_S)
        healthy = httpx.get(f"{server.url}/health").status_code == 200
        assert healthy, "it answers requests and says that it is dead"
    assert health.lies == []
    assert False in health.seen

    last = Stream(server.url, max_tokens=1900)
    eventually(lambda: last.started, START_S)
    batch = batch_of(server.url, 200)
    eventually(lambda: httpx.get(batch).json()["status"] == "in_progress", START_S)
    os.killpg(server.process.pid, signal.SIGTERM)  # as a service manager does
    statuses: list[int] = []
    eventually(lambda: not is_ready(server.url, statuses), START_S)
    assert 503 in statuses, "it says that it takes no more"
    last.thread.join(timeout=START_S)
    assert last.done and not last.error_event, "SIGTERM cut an answer off"
    assert server.process.wait(timeout=START_S) == 0
    assert "cut off" not in server.log.read_text(), "it waited for a batch, which goes on later"


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes")
def test_an_engine_without_memory_answers_503_and_is_replaced(server: Server) -> None:
    pid = server.engine_pid()
    assert pid is not None
    eventually(lambda: answers(server.url), START_S)
    taken = psutil.Process(pid).memory_info().vms
    psutil.Process(pid).rlimit(psutil.RLIMIT_AS, (taken, taken))
    statuses = set()
    deadline = time.monotonic() + 180
    while server.engine_pid() in (pid, None) or statuses == {200}:
        assert time.monotonic() < deadline, f"it is not replaced; answers: {statuses}"
        body = {"model": "demo", "prompt": "word " * random.randrange(100, 1500), "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 503), answer.text
        assert answer.status_code == 200 or int(answer.headers["retry-after"]) > 0
    eventually(lambda: answers(server.url), START_S)
    assert 503 in statuses


COMPLETION = {"model": "demo", "prompt": "x", "max_tokens": 4}


def batch_of(url: str, lines: int) -> str:
    """A batch with long answers; where its status is."""
    asked = COMPLETION | {"max_tokens": 1500, "ignore_eos": True}
    content = "\n".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": asked})
        for n in range(lines)
    )
    sent = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
    file_id = httpx.post(f"{url}/v1/files", **sent).json()["id"]
    ask = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return f"{url}/v1/batches/{httpx.post(f'{url}/v1/batches', json=ask).json()['id']}"


def answers(url: str) -> bool:
    """Whether a request gets its answer now."""
    return httpx.post(f"{url}/v1/completions", json=COMPLETION).status_code == 200


def is_ready(url: str, statuses: list[int]) -> bool:
    """Whether it takes requests; what it says is added."""
    try:
        statuses.append(httpx.get(f"{url}/ready").status_code)
    except httpx.TransportError:
        return False
    return statuses[-1] == 200


class Stream:
    """A streaming client in a thread of its own."""

    def __init__(self, url: str, max_tokens: int = 1500) -> None:
        self.started = self.done = self.error_event = False
        self._url = url
        self._body = {
            "model": "demo",
            "prompt": "count",
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        request = httpx.stream("POST", f"{self._url}/v1/completions", json=self._body)
        with contextlib.suppress(httpx.HTTPError), request as response:  # the flags tell
            for line in response.iter_lines():
                self.started = self.started or line.startswith("data: ")
                self.done = self.done or line == "data: [DONE]"
                self.error_event = self.error_event or line.startswith('data: {"error"')


class HealthWatch:
    """Polls /health; it may lag behind the truth by a second, not more."""

    def __init__(self, server: Server) -> None:
        self.seen: list[bool] = []
        self.lies: list[str] = []
        self._server = server
        self._stopped = threading.Event()
        self._dead_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(timeout=START_S)

    def _run(self) -> None:
        while not self._stopped.wait(0.05):
            alive = self._server.engine_pid() is not None
            now = time.monotonic()
            self._dead_since_s = None if alive else self._dead_since_s or now
            try:
                healthy = httpx.get(f"{self._server.url}/health").status_code == 200
            except httpx.HTTPError as error:
                self.lies.append(f"no answer: {error}")
                continue
            self.seen.append(healthy)
            dead_s = 0.0 if self._dead_since_s is None else now - self._dead_since_s
            if healthy and dead_s > 1.0 and self._server.engine_pid() is None:
                self.lies.append(f"healthy {dead_s:.1f} s after its death")
