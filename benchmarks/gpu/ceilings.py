"""What the device itself can do: read memory, copy it, multiply large matrices.

Invariant: the best of several repeats, and nothing of it stays allocated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.options import Options
from tandem.executor.device import wait_for

REPEATS = 5
AT_ONCE = 4  # calls that are timed together, so that a launch does not count


@dataclass(frozen=True)
class Ceilings:
    """Bytes/s and FLOP/s. A copy counts the bytes that it reads and those that it writes."""

    read_bytes_per_s: float
    copy_bytes_per_s: float
    flops: float

    @property
    def bytes_per_s(self) -> float:
        """The most that any of them moved: the limit of what decode streams."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)


def measure(options: Options) -> Ceilings:
    """Of `options.device`, in a second or two."""
    device = torch.device(options.device)
    read, copy = _memory(options.stream_bytes, device)
    flops = _matrix(options.matrix, getattr(torch, options.dtype), device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Ceilings(read, copy, flops)


def rows(ceilings: Ceilings) -> Iterator[dict[str, object]]:
    """For the table."""
    yield {
        "read_gb_per_s": ceilings.read_bytes_per_s / 1e9,
        "copy_gb_per_s": ceilings.copy_bytes_per_s / 1e9,
        "tflops": ceilings.flops / 1e12,
    }


def _memory(size: int, device: torch.device) -> tuple[float, float]:
    stream = torch.ones(size // 8, dtype=torch.int64, device=device)
    floats = stream.view(torch.float32)
    half = stream.numel() // 2
    target, source = stream[:half], stream[half : 2 * half]
    # Which reduction reads fastest depends on the device.
    read_s = min(_seconds(stream.max, device), _seconds(floats.sum, device))
    copy_s = _seconds(lambda: target.copy_(source), device)
    return stream.nbytes / read_s, 2 * source.nbytes / copy_s


def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> float:
    left, right = (torch.randn((size, size), dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * size**3 / _seconds(lambda: torch.mm(left, right, out=out), device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call: the best of the repeats, of which the first only warms up."""
    found = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        for _ in range(AT_ONCE):
            work()
        wait_for(device)
        found.append((time.perf_counter() - began) / AT_ONCE)
    return min(found[1:])
