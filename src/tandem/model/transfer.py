"""Copies between the host and a device that computes asynchronously, without waiting for it.

A copy from or to ordinary memory waits until the device has done everything before it. Hence these
go through page-locked memory. Invariant: only `Fetched.get` waits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` of `values` on the host. On a CPU `values` themselves."""
    if device.type != "cuda":
        return values.to(device)
    # torch's allocator of page-locked memory reuses it only when the copy is done.
    return values.pin_memory().to(device, non_blocking=True)


def indices(values: list[int], device: torch.device) -> Tensor:
    """int64 [values] on `device`."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)


class Fetched:
    """A tensor on its way to the host."""

    def __init__(self, source: Tensor) -> None:
        """Its values are those at this place in the device's order of work."""
        self._values = source
        self._arrived: torch.cuda.Event | None = None
        if source.device.type == "cuda":
            self._values = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._values.copy_(source, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def get(self) -> Tensor:
        """The values on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
