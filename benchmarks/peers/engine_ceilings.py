"""What the machine itself can do: reading memory, and multiplying matrices.

Two limits: a decode step cannot be shorter than one read of the weights,
a prefill not shorter than its FLOPs at the rate of a large matrix product in its type.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

STREAM_BYTES = 1 << 30
MATRIX = 2048


class Ceilings:
    """Holds the buffers, so that a job allocates nothing."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device = device
        self._stream = torch.ones(STREAM_BYTES // 8, dtype=torch.int64, device=device)
        square = (MATRIX, MATRIX)
        self._left = torch.randn(square, dtype=dtype, device=device)
        self._right = torch.randn(square, dtype=dtype, device=device)
        self._out = torch.empty(square, dtype=dtype, device=device)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Best of `repeats`: read bandwidth in bytes/s, matrix rate in FLOP/s."""
        repeats = range(job["repeats"])
        read_s = min(self._timed(self._stream.max) for _ in repeats)
        matrix_s = min(self._timed(self._multiply) for _ in repeats)
        return {"read_bytes_per_s": STREAM_BYTES / read_s, "flops": 2.0 * MATRIX**3 / matrix_s}

    def _multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._out)

    def _timed(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


def start(model: str, options: dict[str, Any]) -> Ceilings:
    """Allocate the buffers; the model does not matter."""
    torch.set_num_threads(options["threads"])
    dtype = torch.float32 if options.get("dtype") == "float32" else torch.bfloat16
    return Ceilings(options["device"], dtype)


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    return {"torch": version("torch")}
