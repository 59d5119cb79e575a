"""Soak a server with clients that come and go: one that runs (`--url`), or the demo model's own.

The core is `tandem.bench.soak`; this starts and ends a server around it when none was named, and
watches the memory of all its processes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from tandem.bench.client import first_model
from tandem.bench.http1 import Origin, ProtocolError, fetch
from tandem.bench.soak import SoakOptions, soak
from tandem.cli.bench import print_soak

START_S = 180.0


@contextmanager
def demo_server(port: int, kv_memory: str, log: Path) -> Iterator[int]:
    """`tandem serve demo` on `port`; yields its process id once it is ready."""
    script = Path(sys.executable).with_name("tandem")
    command = [str(script), "serve", "demo", "--port", str(port), "--kv-memory", kv_memory]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_ready(process, Origin.parse(f"http://127.0.0.1:{port}"), log)
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_ready(process: subprocess.Popen[bytes], origin: Origin, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        try:
            status, _ = asyncio.run(fetch(origin, "GET", "/ready", {}))
        except (OSError, ProtocolError):
            status = 0
        if status == 200:
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {START_S:.0f} s; see {log}")


def main(
    url: Annotated[str, typer.Option(help="A running server; empty: start one.")] = "",
    port: Annotated[int, typer.Option(help="Of the server that is started.")] = 8017,
    pid: Annotated[list[int] | None, typer.Option(help="Processes of --url to watch.")] = None,
    clients: Annotated[int, typer.Option(help="Concurrent streaming clients.")] = 64,
    seconds: Annotated[float, typer.Option(help="How long they ask.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of prompts, parameters and disconnects.")] = 0,
    warmup: Annotated[float, typer.Option(help="Memory is watched after so many seconds.")] = 60.0,
    kv_memory: Annotated[
        str, typer.Option(help="Of the started server; small, so that the cache fills at once.")
    ] = "32MiB",
    log: Annotated[Path, typer.Option(help="The started server's output.")] = Path("soak.log"),
    out: Annotated[Path | None, typer.Option(help="Write the report here as JSON.")] = None,
) -> None:
    """Soak; exit status 1 unless every answer was whole and everything was given back."""
    settings = {"clients": clients, "seconds": seconds, "seed": seed, "warmup_s": warmup}
    if url:
        clean = _run(url, tuple(pid or ()), settings, out)
    else:
        with demo_server(port, kv_memory, log) as server:
            clean = _run(f"http://127.0.0.1:{port}", (server,), settings, out)
    raise typer.Exit(0 if clean else 1)


def _run(url: str, pids: tuple[int, ...], settings: dict[str, Any], out: Path | None) -> bool:
    origin = Origin.parse(url)
    model = asyncio.run(first_model(origin, None))
    report = asyncio.run(soak(SoakOptions(origin, model, pids=pids, **settings)))
    print_soak(report)
    if out is not None:
        out.write_text(json.dumps(msgspec.to_builtins(report), indent=1) + "\n")
    return report.clean


if __name__ == "__main__":
    typer.run(main)
