"""Starts one worker process an engine and lets only those run that have a job.

Knows the workers' JSON lines, not what a job means. Invariant: between `end` and `begin` a
worker's whole process group is stopped (SIGSTOP), so an idle engine takes no CPU time;
`idle_cpu_s` proves it.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "67108864",
}


@dataclass(frozen=True)
class WorkerSpec:
    """How to start one engine: its module, interpreter, options, environment.

    `name` is how the report calls it, since one engine may run under several settings.
    """

    name: str
    engine: str
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


class Worker:
    """A loaded engine in its own process group, stopped while it has no job."""

    def __init__(self, spec: WorkerSpec, model: Path, log: Path) -> None:
        self.spec = spec
        self._idle_s = 0.0
        self._stopped_at_s: float | None = None
        here = Path(__file__).resolve().parents[2]
        paths = filter(None, (str(here), os.environ.get("PYTHONPATH")))
        environ = os.environ | spec.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [spec.python, "-m", "benchmarks.peers.worker", spec.engine, str(model)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(spec.options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environ,
                start_new_session=True,
            )
        self._log = log
        try:
            self.ready: dict[str, Any] = self._answer()
        except BaseException:
            self.close()
            raise
        self._stop()

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Wake the worker, do `job`, stop it again. Raises `RuntimeError` if it died."""
        self.begin(job)
        return self.end()

    def begin(self, job: dict[str, Any]) -> None:
        """Wake the worker and hand it `job`, which `end` waits for."""
        self._wake()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """Wait for the answer and stop the worker. Raises `RuntimeError` if it died."""
        answer = self._answer()
        self._stop()
        return answer

    def answers_within(self, seconds: float) -> bool:
        """Wait at most so long for the answer to the job that was begun."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group (SIGSTOP, SIGCONT: pause and go on)."""
        os.killpg(self._process.pid, number)

    def interrupt(self) -> None:
        """Tell the worker itself, by SIGUSR1, to end a job that has no end of its own."""
        os.kill(self._process.pid, signal.SIGUSR1)

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the group; what its processes share counts once for each."""
        return sum(each.memory_info().rss for each in self._family())

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the group's processes have used so far."""
        return sum(sum(each.cpu_times()[:2]) for each in self._family())

    @property
    def idle_cpu_s(self) -> float:
        """CPU seconds that the whole group used while it was meant to be stopped."""
        return self._idle_s

    def close(self) -> None:
        """End the worker's process group."""
        os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            pass  # closes the pipes and waits

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-15:])
            raise RuntimeError(
                f"the {self.spec.name} worker ended; the end of {self._log}:\n{tail}"
            )
        return dict(json.loads(line))

    def _stop(self) -> None:
        self.send(signal.SIGSTOP)
        self._stopped_at_s = self.cpu_s

    def _wake(self) -> None:
        if self._stopped_at_s is not None:
            self._idle_s += self.cpu_s - self._stopped_at_s
        self.send(signal.SIGCONT)

    def _family(self) -> list[psutil.Process]:
        process = psutil.Process(self._process.pid)
        return [process, *process.children(recursive=True)]


class Workers:
    """All workers of one comparison; a context manager that ends them."""

    def __init__(self, specs: list[WorkerSpec], model: Path, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.by_name: dict[str, Worker] = {}
        try:
            for spec in specs:
                self.by_name[spec.name] = Worker(spec, model, logs / f"{spec.name}.log")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every worker that was started."""
        for worker in self.by_name.values():
            worker.close()


def vllm_environ(env_dir: Path, cores: Sequence[int], kv_gib: int) -> dict[str, str]:
    """Environment for vLLM's CPU wheel: allocator and OpenMP libraries of `env_dir` preloaded."""
    preload = sorted(env_dir.glob("deb/**/libtcmalloc_minimal.so.4")) + sorted(
        env_dir.glob("lib/libiomp5.so")
    )
    return {
        "LD_PRELOAD": ":".join(shlex.quote(str(path)) for path in preload),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The same kernels; the other cache of them fails to load and compiles at every start.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def in_new_process(call: Callable[..., Any], *given: Any) -> Any:
    """What `call` returns in a process that ends with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *given).result()
