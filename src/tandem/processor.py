"""The processor that a process shares: how long its threads spin, and who else computes.

OpenMP's threads wait for each other by spinning. That is the fastest way as long as each has a core
of its own; where another process has the core, a thread that spins keeps away the one it waits for.
Invariant: nothing here changes what the user has set in the environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, MutableMapping
from dataclasses import dataclass

import psutil

# Of GNU's OpenMP, some microseconds. Its own default is 300,000, some milliseconds: as long as a
# turn of the kernel's scheduler (`python -m benchmarks shared_processor`, docs/troubleshooting.md).
_SPINS = "200"
_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Cores that are missing from which on others are in the way.
_BUSY_CORES = 0.25
_LOOK_S, _FIRST_LOOK_S = 2.0, 0.25


def spin_briefly(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let threads of this process sleep soon when they wait; call it before torch is imported.

    Where the environment says how they wait, nothing is changed. Other libraries than GNU's, which
    torch has on Linux, ignore it.
    """
    if not any(name in environ for name in _SPIN_VARIABLES):
        environ["GOMP_SPINCOUNT"] = _SPINS


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(core_numbers())


def core_numbers() -> tuple[int, ...]:
    """Numbers of these cores, ascending."""
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # not on every platform
        return tuple(range(os.cpu_count() or 1))


def keep_to(cores: Collection[int]) -> None:
    """Run on `cores` alone (none: as before), also with threads that are made later. Linux only.

    Call it before torch is imported: it makes as many threads as there are cores.
    """
    if cores:
        for thread in psutil.Process().threads():
            os.sched_setaffinity(thread.id, cores)


@dataclass(frozen=True, slots=True)
class Share:
    """What others took of the processor over a while, in cores: other processes, and the machine
    below a virtual one (`stolen`). `wanted` is how many this process computes with."""

    cores: int
    wanted: int
    others: float
    stolen: float

    @property
    def busy(self) -> bool:
        """Whether others leave fewer cores than are wanted."""
        return self.others + self.stolen > self.cores - min(self.wanted, self.cores) + _BUSY_CORES

    def __str__(self) -> str:
        taken = f"other processes take {self.others:.1f} of {self.cores} cores"
        return f"{taken}, the machine below {self.stolen:.1f}" if self.stolen > 0.05 else taken


class Watch:
    """Looks at the processor between two calls of `look`.

    Our own are this process with its children or, where `beneath` is set, with its parent alone:
    the server of an engine. Looking for children takes milliseconds.
    """

    def __init__(self, wanted: int = 0, *, beneath: bool = False) -> None:
        self._process = psutil.Process()
        self._parent = self._process.parent() if beneath else None
        self._beneath = beneath
        self._cores = usable_cores()
        self._wanted = wanted or self._cores
        self._before = self._now()

    def look(self) -> Share | None:
        """Since the last look, or since this was made; None if no time has passed."""
        before, self._before = self._before, self._now()
        elapsed, busy, stolen, own = (
            after - earlier for after, earlier in zip(self._before, before, strict=True)
        )
        if elapsed <= 0.0:
            return None
        others = max(0.0, busy - max(0.0, own)) * self._cores / elapsed
        return Share(self._cores, self._wanted, others, stolen * self._cores / elapsed)

    def _now(self) -> tuple[float, float, float, float]:
        """Seconds of our cores so far: all, busy, stolen, and used by this process's family."""
        every = psutil.cpu_times(percpu=True)
        try:
            mine = [every[core] for core in os.sched_getaffinity(0)]
        except (AttributeError, IndexError):
            mine = every
        total = busy = stolen = 0.0
        for core in mine:
            times = core._asdict()
            stolen += times.get("steal", 0.0)
            idle = times["idle"] + times.get("iowait", 0.0)
            # User time has that of guests in it.
            whole = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
            total += whole
            busy += whole - idle - times.get("steal", 0.0)
        return total, busy, stolen, self._own_s()

    def _own_s(self) -> float:
        times = self._process.cpu_times()
        own = times.user + times.system
        others = [] if self._beneath else self._process.children(recursive=True)
        for other in others if self._parent is None else [self._parent]:
            try:
                used = other.cpu_times()
            except psutil.NoSuchProcess:
                continue
            own += used.user + used.system
        return float(own)


class FreeCores:
    """How many threads an engine computes with: as many as others leave cores, of `most`.

    A thread whose core another process has holds up all that wait for it, so one thread less is
    faster. What others take is looked at while the engine computes, every two seconds; what they
    took while it did not says nothing of now.
    """

    def __init__(
        self,
        most: int,
        look: Callable[[], Share | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._look = look or Watch(most, beneath=True).look
        self._clock = clock
        self._looked_s = clock()
        self._every_s = _FIRST_LOOK_S
        self._threads = most

    def count(self) -> int:
        """From 1 to `most`."""
        passed_s = self._clock() - self._looked_s
        if passed_s < self._every_s:
            return self._threads
        self._looked_s += passed_s
        share = self._look()
        self._every_s = _LOOK_S
        if passed_s > 2.0 * _LOOK_S:
            self._every_s = _FIRST_LOOK_S
        elif share is not None:
            free = round(share.cores - share.others - share.stolen)
            self._threads = max(1, min(self._most, free))
        return self._threads
