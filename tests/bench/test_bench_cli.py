from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripted_server import Script, ScriptedServer, scripted
from typer.testing import CliRunner

from tandem.bench.soak import GIVEN_BACK
from tandem.cli.bench import app

LATENCY_FIELDS = {"count", "mean", "p50", "p90", "p95", "p99", "max"}


@contextmanager
def in_thread(script: Script) -> Iterator[ScriptedServer]:
    """The scripted server on a loop of its own, for commands that run theirs."""
    ready, servers = threading.Event(), []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with scripted(script) as server:
            servers.append(server)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield servers[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_report_as_json(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    flags = ["--rate", "50", "--max-requests", "5", "--output-tokens", "4", "--ttft-slo", "600"]
    flags += ["--details", "--warmup", "2"]
    with in_thread(Script(gap_s=0.002)) as server:
        result = CliRunner().invoke(app, ["serve", "--url", server.url, *flags, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "time to first token" in result.output and "goodput" in result.output
    report = json.loads(out.read_text())
    assert report["schema"] == "tandem-bench-1"
    assert set(report) == {"schema", "options", "summary", "client_fell_behind", "requests"}
    summary = report["summary"]
    assert summary["completed"] == 5 and summary["output_tokens"] == 20
    assert summary["goodput_share"] == 1.0
    for name in ("ttft", "tpot", "itl", "e2e", "client_lag"):
        assert set(summary[name]) == LATENCY_FIELDS
    assert len(report["requests"]) == 5, "the warm-up is not measured"
    assert len(server.seen) == 7
    assert report["options"]["max_requests"] == 5
    assert "api_key" not in report["options"]


def test_refusals_are_one_line() -> None:
    result = CliRunner().invoke(app, ["serve", "--prompt-tokens", "gauss:3"])
    assert result.exit_code == 2
    assert "lengths 'gauss:3'" in result.output
    result = CliRunner().invoke(app, ["serve", "--url", "ftp://nowhere", "--max-requests", "1"])
    assert result.exit_code == 2


def test_all_failed_is_a_failure() -> None:
    flags = ["--rate", "100", "--max-requests", "3", "--warmup", "0"]
    with in_thread(Script(status=503)) as server:
        result = CliRunner().invoke(app, ["serve", "--url", server.url, *flags])
    assert result.exit_code == 1
    assert "failed: http 503" in result.output and "scripted refusal" in result.output


def test_soak_command(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    with in_thread(Script()) as server:
        server.metrics = "".join(f"{name} 0.0\n" for name in GIVEN_BACK)
        flags = ["--seconds", "0.3", "--clients", "8", "--out", str(out)]
        result = CliRunner().invoke(app, ["soak", "--url", server.url, *flags])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["errors"] == {} and report["held"] == {} and report["completed"] > 0
