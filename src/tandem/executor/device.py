"""Waits for a device that computes asynchronously.

Invariant: no clock is read for a result before the work of the result is done.
"""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Return once `device` has computed everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class RunAhead:
    """Bounds how far ahead of a device its work is given: one piece runs, the next one waits.

    So the device is never idle between pieces, and what is urgent waits for two of them at most.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Event | None = None

    def given(self) -> None:
        """A piece was given to the device. Returns once the piece before it is done."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        if self._last is not None:
            self._last.synchronize()
        self._last = event
