"""`tandem serve` as a process that is killed and started again, and what a run has found."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

SERVE = [sys.executable, "-c", "from tandem.cli import main; main()", "serve", "demo"]
CONFIG = """
[model]
dtype = "float32"
threads = 1
[cache]
memory_bytes = 67108864
[learning]
rank = 4
batch_samples = 4
steps_per_version = 1
version_wait_s = 1.0
epochs = 1
held_out = 0.0
gate = "always"
[server]
port = 0
log_level = "warning"
[store]
directory = "{state}"
"""


@dataclass
class Report:
    """What happened, and what should not have."""

    kills: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    jobs: int = 0
    starts: int = 0
    slowest_start_s: float = 0.0
    violations: list[str] = field(default_factory=list)


class Server:
    """`tandem serve` with a TMPDIR of its own, started again and again."""

    def __init__(self, folder: Path, patience_s: float, report: Report) -> None:
        self.state, self.temporary = folder / "state", folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._config = folder / "tandem.toml"
        self._config.write_text(CONFIG.format(state=self.state))
        self._folder, self._patience_s, self._report = folder, patience_s, report
        self.url = ""
        self.engines: set[int] = set()

    def start(self, *, wait: bool = True) -> None:
        """Start it; with `wait`, until it is ready."""
        self._report.starts += 1
        self._log = self._folder / f"serve-{self._report.starts}.log"
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [*SERVE, "--config", self._config],
                stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )  # fmt: skip
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until it takes requests. Raises `TimeoutError`, or `RuntimeError` if it ended."""
        began_s = time.monotonic()
        self.until(self._announced, "the server is not ready")
        self.until(self._ready, "the engine is not ready")
        took_s = time.monotonic() - began_s
        self._report.slowest_start_s = max(self._report.slowest_start_s, took_s)
        self.engine()

    def until(self, condition: Callable[[], object], problem: str) -> None:
        """Wait. Raises `TimeoutError`."""
        deadline_s = time.monotonic() + self._patience_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{problem} after {self._patience_s:.0f} s ({self._log})")
            time.sleep(0.05)

    def engine(self) -> int:
        """Process id of the engine; 0 while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                if "tandem.build" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    self.engines.add(child.pid)
                    return child.pid
        return 0

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at `path`."""
        answer = httpx.get(f"{self.url}{path}", params=query, timeout=self._patience_s)
        answer.raise_for_status()
        return answer.json()

    def _announced(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended by itself ({self._log})")
        found = re.findall(r"ready on (http://\S+)", self._log.read_text())
        self.url = found[0] if found else ""
        return bool(found)

    def _ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        return False
