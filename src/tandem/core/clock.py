"""Clocks. Time is passed in and never looked up, so the simulator can replace it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary, fixed origin; never decreases."""
        ...


class WaitingClock(Clock, Protocol):
    """A clock on which one can wait."""

    def advance(self, seconds: float) -> None:
        """Return after `seconds` seconds."""
        ...

    def advance_to(self, now_s: float) -> None:
        """Return at the time `now_s`, which is not in the past."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. Its values can be compared between processes of one machine.

    On Linux (CLOCK_MONOTONIC) and macOS (mach_absolute_time) all processes count from the boot.
    Between machines the values cannot be compared.
    """

    def now(self) -> float:
        """Seconds since boot."""
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to. For tests and the simulator."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """The time that was set last."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (never backward)."""
        assert seconds >= 0.0
        self._now_s += seconds

    def advance_to(self, now_s: float) -> None:
        """Move to `now_s` exactly, which is not in the past."""
        assert now_s >= self._now_s
        self._now_s = now_s


class SleepingClock:
    """The machine's monotonic clock. Waiting on it sleeps."""

    def now(self) -> float:
        """Seconds since boot."""
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def advance_to(self, now_s: float) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, now_s - self.now()))
