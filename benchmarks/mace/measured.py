"""The MACE comparison on a real engine: a load that the machine can bear, and how it was measured.

What a request and a job take without haste decides how many come and what is in time. Engines are
made by the caller. Invariant: figures of the comparison are taken as in simulation, on another
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.mace.runs import (
    Engine,
    MakeEngine,
    Scale,
    Variant,
    load_of,
    prompt_s,
    run_arrivals,
)
from tandem.core.request import Request
from tandem.core.training import TrainingStep
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import Profile
from tandem.sim.run import Arrival

# Lengths are a sixth of the simulated ones: in iterations that only decode, a prompt and a job then
# take about what they take there.
SMALL = Scale(
    "cpu",
    "",
    rate=1.0,
    duration_s=6.0,
    prompt_tokens=32,
    shared_tokens=16,
    output_tokens=16,
    pair_tokens=64,
)
# At this retrain rate answers and jobs ask for all of the machine's time.
FULL_RATE = 0.5
# `ekya` opens so many windows during the arrivals: as many as at the simulated server.
WINDOWS = 6
# Requests of a crowd, requests that come alone, and jobs, by which the machine is judged.
CROWD, ALONE, JOBS = 64, 8, 4

_ALONE = Variant("alone", "no_retrain", prefix_caching=False)
_CROWD = Variant("crowd", "no_retrain")
_JOBS = Variant("jobs", "adainf")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What work takes without haste, in seconds.

    A request alone has its first token after `ttft_s` (by the profile, its forward takes
    `forward_s`) and then one every `tpot_s` (medians); in a crowd it takes `request_s` of the
    engine's time, and a job, when there is nothing else, `job_s`.
    """

    ttft_s: float
    forward_s: float
    tpot_s: float
    request_s: float
    job_s: float

    def rate(self, retrain_rate: float) -> float:
        """Requests/s that, with their jobs, take all of the engine's time."""
        return 1.0 / (self.request_s + retrain_rate * self.job_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """How the figures of a scale were measured: on which machine, of which other processes took
    the share `others` meanwhile, with `ekya`'s windows every `window_s`, in so many rounds."""

    machine: dict[str, object]
    capacity: Capacity
    window_s: float
    rounds: int
    others: float


def measure_capacity(scale: Scale, profile: Profile, make_engine: MakeEngine) -> Capacity:
    """Of the machine that `make_engine` uses, with the lengths of `scale`."""
    enough = replace(scale, rate=1.0, duration_s=4.0 * CROWD)
    arrivals, _ = load_of(enough, profile, 1.0, seed=0)
    requests = [each.work for each in arrivals if isinstance(each.work, Request)][:CROWD]
    jobs = [each.work for each in arrivals if isinstance(each.work, TrainingStep)]
    crowd_s = _together(make_engine(_CROWD, profile), scale, requests)
    engine = make_engine(_JOBS, profile)
    _together(engine, scale, jobs[:1])  # the first one finds nothing prepared
    jobs_s = _together(engine, scale, jobs[1 : 1 + JOBS])
    engine, latency = make_engine(_ALONE, profile), LatencyModel(profile.rates)
    outcomes = [
        outcome
        for request in requests[:ALONE]
        for outcome in run_arrivals(engine, scale, [Arrival(0.0, request)]).outcomes.values()
    ]
    return Capacity(
        ttft_s=median([each.ttft_s for each in outcomes]),
        forward_s=median([prompt_s(latency, each.prompt_tokens) for each in outcomes]),
        tpot_s=median([value for each in outcomes if (value := each.tpot_s) is not None]),
        request_s=crowd_s / len(requests),
        job_s=jobs_s / JOBS,
    )


def bearable(scale: Scale, capacity: Capacity) -> Scale:
    """`scale` with as many requests as can be borne at `FULL_RATE`, in three digits."""
    return replace(scale, rate=float(f"{capacity.rate(FULL_RATE):.3g}"))


def _together(engine: Engine, scale: Scale, works: Sequence[Request | TrainingStep]) -> float:
    """Seconds until all have ended that come at once."""
    return run_arrivals(engine, scale, [Arrival(0.0, work) for work in works]).ended_s
