"""What a device reaches at most: one large matrix product, and reading memory.

Speeds are quoted as shares of these two. Medians of a few repetitions; nothing else should run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from tandem.estimators.profile import Ceilings

_SIDE = 2048
_READ_BYTES = 1 << 28
_REPEATS = 7


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """Of `device` in `dtype`, as `ModelInfo` names them."""
    where, kind = torch.device(device), getattr(torch, dtype)
    left, right = (torch.randn(_SIDE, _SIDE, device=where).to(kind) for _ in range(2))
    product_s = _time(lambda: left @ right, where)
    block = torch.ones(_READ_BYTES // 4, device=where)
    read_s = _time(lambda: block.sum(), where)
    return Ceilings(2.0 * _SIDE**3 / product_s, _READ_BYTES / read_s)


def _time(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])
