"""Waits for a device that computes asynchronously, and tells how long its work took.

Invariant: no time is read for a result before the work of the result is done.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the order of a device's work."""

    def wait(self) -> None:
        """Return once the device has come here."""
        ...

    def seconds_until(self, later: Mark) -> float:
        """Seconds from here to `later`, which must be of the same kind. Waits for it."""
        ...


class _HostMark:
    """The work of a CPU is done when the call returns."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def wait(self) -> None:
        """See `Mark`."""

    def seconds_until(self, later: Mark) -> float:
        """See `Mark`."""
        assert isinstance(later, _HostMark)
        return later._at - self._at


class _CudaMark:
    """An event. The device notes the time when it comes there, so that it does not count how late
    the host asks."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def wait(self) -> None:
        """See `Mark`."""
        self._event.synchronize()

    def seconds_until(self, later: Mark) -> float:
        """See `Mark`."""
        assert isinstance(later, _CudaMark)
        later.wait()
        return self._event.elapsed_time(later._event) / 1e3


def mark(device: torch.device) -> Mark:
    """The end of what was given to `device` so far."""
    return _CudaMark() if device.type == "cuda" else _HostMark()


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
