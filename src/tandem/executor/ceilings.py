"""Measures the limits of a device: one large matrix product, and reading memory.

The product is torch's or that of the weights as they are served, whichever is faster. Speeds are
given as shares of these limits. Results are medians of a few repetitions; nothing else should run
meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from tandem.estimators.profile import Ceilings
from tandem.executor.device import wait_for
from tandem.model.linear import pack

_LEAST_SIDE, _SIDE = 256, 2048
_ENOUGH_S = 0.1
_READ_BYTES = 1 << 28
_REPEATS = 7


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """Limits of `device` in `dtype`, both named as in `ModelInfo`."""
    where, kind = torch.device(device), getattr(torch, dtype)
    side, product_s = _LEAST_SIDE, _product_s(_LEAST_SIDE, where, kind)
    while side < _SIDE and product_s < _ENOUGH_S:  # slow if the device lacks this arithmetic
        side *= 2
        product_s = _product_s(side, where, kind)
    block = torch.ones(_READ_BYTES // 4, device=where)
    read_s = _time(lambda: block.sum(), where)
    return Ceilings(2.0 * side**3 / product_s, _READ_BYTES / read_s)


def _product_s(side: int, device: torch.device, kind: torch.dtype) -> float:
    left, right = (torch.randn(side, side, device=device).to(kind) for _ in range(2))
    packed = pack(right, None)
    return min(_time(lambda: left @ right, device), _time(lambda: packed.multiply(left), device))


def _time(call: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        wait_for(device)
        times.append(time.perf_counter() - began)
    return median(times[1:])
