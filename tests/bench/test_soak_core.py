from __future__ import annotations

import os
import subprocess
import sys
from random import Random
from typing import Any

import pytest
from scripted_server import Script, scripted

from tandem.bench.http1 import Origin
from tandem.bench.slope import fit_slope, student_t
from tandem.bench.soak import GIVEN_BACK, SoakOptions, parse_metrics, resident_bytes, soak

CLEAN = "".join(f"{name} 0.0\n" for name in GIVEN_BACK)


async def run(script: Script, metrics: str, **changes: Any) -> Any:
    async with scripted(script) as server:
        server.metrics = metrics
        fields: dict[str, Any] = {
            "clients": 8,
            "seconds": 0.6,
            "seed": 1,
            "disconnect_share": 0.3,
            "settle_s": 0.3,
        } | changes
        report = await soak(SoakOptions(Origin.parse(server.url), "scripted", **fields))
        return report, server


async def test_a_clean_run() -> None:
    report, server = await run(Script(gap_s=0.001), CLEAN, clients=40)
    assert report.clean, (report.errors, report.held)
    assert report.completed > 10 and report.disconnected > 3
    assert report.requests == report.completed + report.disconnected
    assert {"messages", "prompt"} <= {key for body, _ in server.seen for key in body}


async def test_errors_and_leaks_are_found() -> None:
    leak = CLEAN.replace("tandem_kv_blocks_used 0.0", 'tandem_kv_blocks_used{group="0"} 3.0')
    report, _ = await run(Script(error_after=1), leak)
    assert report.held == {"tandem_kv_blocks_used": 3.0}
    assert any(kind.startswith("stream: engine ended") for kind in report.errors)
    assert not report.clean
    report, _ = await run(Script(cut_after=1), "")
    assert report.errors and len(report.held) == len(GIVEN_BACK)


async def test_a_server_that_is_away_is_an_error_of_the_report() -> None:
    report = await soak(SoakOptions(Origin.parse("127.0.0.1:1"), "m", clients=1, seconds=0.0))
    assert not report.clean and not report.held
    [error] = report.errors
    assert error.startswith("/metrics: ")


async def test_memory_is_watched() -> None:
    report, _ = await run(
        Script(), CLEAN, seconds=1.5, clients=1, warmup_s=0.0, pids=(os.getpid(),)
    )
    assert report.memory_bytes and min(report.memory_bytes) > 1 << 20
    assert report.memory is None, "two samples do not make a slope"
    assert resident_bytes((os.getpid(), os.getpid())) < 1.5 * max(report.memory_bytes)


async def test_a_watched_process_that_is_gone_is_an_error_of_the_report() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    report, _ = await run(Script(), CLEAN, seconds=0.5, clients=1, warmup_s=0.0, pids=(gone.pid,))
    assert report.completed and not report.clean and not report.memory_bytes
    assert list(report.errors) == [f"process {gone.pid} is gone: its memory is not watched"]


def test_slope_covers_the_truth_and_sees_growth() -> None:
    rng = Random(7)
    covered = 0
    for _ in range(200):
        times_s = [float(second) for second in range(300)]
        values = [2.0 * at_s + rng.gauss(1e4, 50.0) for at_s in times_s]
        slope = fit_slope(times_s, values)
        assert slope is not None and slope.grows
        covered += slope.low_per_s <= 2.0 <= slope.high_per_s
    assert covered >= 180
    flat = fit_slope(list(range(300)), [rng.gauss(1e4, 50.0) for _ in range(300)])
    assert flat is not None and flat.low_per_s < 0.05
    assert fit_slope([0.0, 1.0], [1.0, 2.0]) is None


@pytest.mark.parametrize(("freedom", "expected"), [(4, 2.776), (10, 2.228), (18, 2.101)])
def test_student_t(freedom: int, expected: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(expected, rel=0.01)


def test_metrics_sum_over_labels() -> None:
    text = '# HELP a b\na{x="1"} 2\na{x="2"} 3.5\nb 1e3\n'
    assert parse_metrics(text) == {"a": 5.5, "b": 1000.0}
