"""`tandem serve --overflow`: the shipped server over two engines, with forecasts of its own."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from patience import START_S, eventually
from tandem.processor import core_numbers
from test_survival import Server, Stream

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="cores of processes"),
    pytest.mark.skipif(len(core_numbers()) < 2, reason="two engines need two cores"),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "serve.log", "--overflow", "cores:1")
    yield server
    server.process.kill()
    server.process.wait(timeout=20)


def metric(server: Server, name: str, engine: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.search(rf'^{name}{{engine="{engine}"}} (\S+)$', text, re.MULTILINE)
    return float(found[1]) if found else -1.0


def overflow_process(server: Server) -> psutil.Process | None:
    last = [str(core_numbers()[-1])]
    for child in psutil.Process(server.process.pid).children():
        words = child.cmdline()
        if "tandem.build" in words and words[words.index("tandem.build") + 1 :] == last:
            return child
    return None


def complete(url: str, max_tokens: int) -> int:
    body = {"model": "demo", "prompt": "count", "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code


def test_kill_9_of_the_overflow_engine_under_load(server: Server) -> None:
    with ThreadPoolExecutor(8) as clients:  # the server learns how long answers are
        lengths = [1000] * 16 + [4] * 300
        assert set(clients.map(lambda tokens: complete(server.url, tokens), lengths)) == {200}
    assert metric(server, "tandem_generation_tokens_total", "overflow") == 0
    long = []
    for _ in range(4):  # one after another: none waits there
        stream = Stream(server.url, 1000)
        eventually(lambda stream=stream: stream.started, START_S)
        long.append(stream)
    short = [Stream(server.url, 7) for _ in range(20)]
    assert metric(server, "tandem_num_requests_running", "overflow") == 4
    process = overflow_process(server)
    assert process is not None and process.cpu_affinity() == [core_numbers()[-1]]
    os.kill(process.pid, signal.SIGKILL)
    short += [Stream(server.url, 7) for _ in range(20)]
    for stream in long:
        stream.thread.join(timeout=10)
        assert stream.error_event, "a client was not told"
    for stream in short:
        stream.thread.join(timeout=30)
        assert stream.done and not stream.error_event, "an answer of the main engine was lost"
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert metric(server, "tandem_engine_up", "overflow") == 0
    assert complete(server.url, 1000) == 200, "the main engine takes it"

    eventually(lambda: metric(server, "tandem_engine_up", "overflow") == 1, START_S)
    assert complete(server.url, 1000) == 200
    assert metric(server, "tandem_generation_tokens_total", "overflow") == 1000
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=30) == 0
