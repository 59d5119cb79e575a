"""Capacity planning in the simulator: how many replicas a load needs, and what they leave over.

Source: Echo, section 5.4. Step 1 takes the busiest minutes of a trace and as few replicas as meet
the objectives. Step 2 takes the whole trace and measures what offline requests or training get
beside it. Of several replicas one is simulated, with every n-th request. Invariant: the same load
and seed give the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tandem.bench.measure import Summary
from tandem.bench.workload import PlannedRequest
from tandem.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Run:
    """One replica under its share of a load. `attainment` is the share of online requests inside
    both objectives; rates are in tokens per second of the replica."""

    attainment: float
    online: Summary
    offline_tokens_s: float = 0.0
    training_tokens_s: float = 0.0


class Simulate(Protocol):
    """Runs one replica on a device. `beside` is what fills the room that requests leave."""

    def __call__(self, load: Sequence[PlannedRequest], *, beside: str = "") -> Run:
        """A run; `beside` is empty, `offline` or `training`."""
        ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """The plan for one device: the fewest replicas, what was tried (replicas, attainment), and a
    replica's run over the whole trace beside offline requests and beside training."""

    device: str
    replicas: int
    peak: Run
    tried: tuple[tuple[int, float], ...]
    offline: Run
    training: Run


def plan_capacity(
    device: str,
    load: Sequence[PlannedRequest],
    simulate: Simulate,
    *,
    peak_s: float,
    attainment: float,
    most: int,
) -> Capacity:
    """Both steps for one device. Raises `InvalidRequest` if `most` replicas are not enough."""
    busiest = peak(load, peak_s)
    runs: dict[int, Run] = {}

    def holds(replicas: int) -> bool:
        runs[replicas] = simulate(share(busiest, replicas))
        return runs[replicas].attainment >= attainment

    replicas = fewest(holds, most)
    if replicas is None:
        best = max(runs.values(), key=lambda run: run.attainment)
        raise InvalidRequest(
            f"{most} replicas of {device} are not enough: at best {best.attainment:.1%} of the "
            f"requests are inside the objectives, and {attainment:.1%} are to be"
        )
    whole = share(load, replicas)
    tried = tuple((number, runs[number].attainment) for number in sorted(runs))
    offline, training = (simulate(whole, beside=name) for name in ("offline", "training"))
    return Capacity(device, replicas, runs[replicas], tried, offline, training)


def peak(load: Sequence[PlannedRequest], window_s: float) -> list[PlannedRequest]:
    """The `window_s` seconds in which the most tokens arrive; they begin at 0."""
    first = tokens = 0
    best, chosen = -1, (0, len(load))
    for end, request in enumerate(load, 1):
        tokens += _tokens(request)
        while request.at_s - load[first].at_s >= window_s:
            tokens -= _tokens(load[first])
            first += 1
        if tokens > best:
            best, chosen = tokens, (first, end)
    begin, end = chosen
    return [replace(each, at_s=each.at_s - load[begin].at_s) for each in load[begin:end]]


def share(load: Sequence[PlannedRequest], replicas: int) -> list[PlannedRequest]:
    """What one of several replicas gets if they take turns."""
    return list(load[::replicas])


def fewest(holds: Callable[[int], bool], most: int) -> int | None:
    """The least number up to `most` that holds, by doubling and then by halves; None if there is
    none. What is larger than one that holds is taken to hold."""
    low, high = 0, 1
    while not holds(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high


def _tokens(request: PlannedRequest) -> int:
    return len(request.prompt) + request.output_tokens
