"""Starts `tandem serve` as a process of its own, with default settings, and ends it.

Knows the command line only. Invariant: the process is ended by us, whatever the study does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

START_S = 600.0
END_S = 90.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The model, a port of this machine, the store's directory and the log; further flags."""

    model: str
    port: int
    store: Path
    log: Path
    flags: Sequence[str] = ()

    @property
    def url(self) -> str:
        """Of the running server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        """`tandem` beside the interpreter that runs the study."""
        script = str(Path(sys.executable).with_name("tandem"))
        named = ["--port", str(self.port), "--store-directory", str(self.store)]
        return [script, "serve", self.model, *named, *self.flags]


@contextmanager
def serving(spec: ServerSpec) -> Iterator[int]:
    """The process id of a server that answers, also ended where this process gets SIGTERM.

    Raises `RuntimeError` if it does not start, or if another one answers at its port.
    """
    if _status(spec) is not None:
        raise RuntimeError(f"another server answers at {spec.url}; choose another --port")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    spec.store.mkdir(parents=True, exist_ok=True)
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with spec.log.open("a") as output:
        process = subprocess.Popen(
            spec.command, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
    try:
        _wait_ready(process, spec)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], spec: ServerSpec) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {spec.log}")
        if _status(spec) == 200:
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {START_S:.0f} s; see {spec.log}")


def _status(spec: ServerSpec) -> int | None:
    """HTTP's of /ready; None where nobody answers."""
    try:
        return httpx.get(f"{spec.url}/ready", timeout=10.0).status_code
    except httpx.HTTPError:
        return None
