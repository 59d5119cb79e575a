"""The machine that figures are measured on, and how busy other processes keep it.

Processor, cores, memory and versions. Knows no model. Invariant: nothing is measured, only read.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import psutil

MATRIX_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")


def describe(device: str, threads: int) -> dict[str, object]:
    """Processor, cores, matrix instructions, memory, versions. `threads` compute on `device`."""
    cpu = _cpu_info()
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    return {
        "device": device,
        "cpu": cpu.get("model name", platform.processor()),
        "cpu_family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "matrix_flags": [flag for flag in MATRIX_FLAGS if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
    }


def busy_cpu_s() -> float:
    """CPU seconds of all cores so far that were not idle. Time taken by a hypervisor counts."""
    times: dict[str, float] = psutil.cpu_times()._asdict()
    # Guests' time is part of the user's time.
    return sum(
        seconds
        for name, seconds in times.items()
        if name not in ("idle", "iowait", "guest", "guest_nice")
    )


def spent_s() -> tuple[float, float, float]:
    """Seconds since arbitrary origins: wall clock, all cores together, and this process's share."""
    return time.perf_counter(), busy_cpu_s(), time.process_time()


class Watch:
    """Observes the machine from its creation on."""

    def __init__(
        self,
        spent: Callable[[], tuple[float, float, float]] = spent_s,
        cores: int = os.cpu_count() or 1,
    ) -> None:
        self._spent, self._cores = spent, cores
        self._began = spent()

    def others(self) -> float:
        """Share of all cores that other processes have used since, 0 to 1."""
        wall_s, busy_s, own_s = (
            now - before for now, before in zip(self._spent(), self._began, strict=True)
        )
        return min(1.0, max(0.0, (busy_s - own_s) / max(self._cores * wall_s, 1e-9)))


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty without that file."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
