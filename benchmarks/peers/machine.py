"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

MATRIX_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")


def describe(device: str, threads: int) -> dict[str, object]:
    """Processor, cores, matrix instructions, memory, accelerator, versions."""
    cpu = _cpu_info()
    flags = set((cpu.get("flags") or cpu.get("Features") or "").split())
    described: dict[str, object] = {
        "device": device,
        "cpu": cpu.get("model name", platform.processor()),
        "cpu_family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "matrix_flags": [flag for flag in MATRIX_FLAGS if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "cuda":
        described["accelerator"] = torch.cuda.get_device_name()
    return described


def slug(described: dict[str, object]) -> str:
    """Name for result files, e.g. `cpu-2-amx_bf16` or `cuda-nvidia-h100`."""
    if described["device"] == "cuda":
        return "cuda-" + "-".join(str(described["accelerator"]).lower().split()[:2])
    flags = described["matrix_flags"]
    assert isinstance(flags, list)
    best = next(
        (flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags), ""
    )
    return "-".join(filter(None, ("cpu", str(described["cores"]), best)))


def busy_cpu_s() -> float:
    """CPU seconds of all cores so far that were not idle; what a hypervisor took counts."""
    times = psutil.cpu_times()._asdict()
    # Guests' time is part of the user's.
    return sum(
        seconds
        for name, seconds in times.items()
        if name not in ("idle", "iowait", "guest", "guest_nice")
    )


def _cpu_info() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
