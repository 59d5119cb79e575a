"""One run of one policy, and its figures: throughput, objectives, hits and memory over time.

Runs loops that the caller makes, real or simulated. Invariant: what a run is made of (requests,
times, seconds) is the same for every policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.echo import online
from benchmarks.echo.watch import Sample, Watch
from tandem.bench.measure import percentile
from tandem.core.clock import WaitingClock
from tandem.core.request import Request
from tandem.core.slo import Slo, WorkClass
from tandem.engine.loop import EngineLoop
from tandem.sim.executor import SimExecutor
from tandem.sim.run import Arrival, SimOutcome, SimReport, Simulation

# Samples of a run, and bins of what is counted over time.
SAMPLES, BINS = 240, 60
_CENTILES = 100


@dataclass(frozen=True, slots=True)
class Work:
    """What every policy gets: online requests, and offline ones, all at the beginning. It is looked
    at for `seconds`."""

    dataset: str
    load: online.Load
    offline: list[Request]
    seconds: float
    slo: Slo


@dataclass(frozen=True, slots=True)
class Bin:
    """What happened until `end_s`: offline tokens of requests that finished, and prompt tokens of
    those whose first token came, with how many of them were cached."""

    end_s: float
    finished_tokens: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """Figures of one run. Percentiles are those of 0 to 100%."""

    policy: str
    dataset: str
    round: int
    seconds: float  # until the pool was empty, or all that the run had
    emptied: bool
    online_requests: int  # that ended, or whose first token was due
    attainment: float  # of them, inside both objectives
    ttft_met: float
    tpot_met: float
    ttft_s: list[float]
    tpot_s: list[float]
    offline_requests: int  # that finished
    offline_tokens: int  # of these, prompts and answers
    hit_share: float  # of offline prompt tokens, which were cached
    online_hit_share: float
    preemptions: int
    iterations: int
    demand_error: float  # mean relative error of the mean demand, of the engine's own count
    others: float = 0.0  # share of this machine's cores that other processes took
    bins: list[Bin] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def tokens_s(self) -> float:
        """Offline tokens, prompts and answers, of requests that finished, a second."""
        return self.offline_tokens / self.seconds

    @property
    def requests_s(self) -> float:
        """Offline requests that finished, a second."""
        return self.offline_requests / self.seconds


def execute(
    loop: EngineLoop,
    clock: WaitingClock,
    work: Work,
    leaps: SimExecutor | None = None,
    on_progress: Callable[[float], None] = lambda now: None,
) -> tuple[SimReport, list[Sample]]:
    """Run it. Offline requests are in the engine before the first online one."""
    watch = Watch(loop)

    def look(now: float) -> None:
        watch(now)
        on_progress(now)

    arrivals = [Arrival(0.0, request) for request in work.offline] + online.arrivals(work.load)
    sample_s = work.seconds / SAMPLES
    simulation = Simulation(loop, clock, arrivals, sample_s=sample_s, leaps=leaps)
    return simulation.run(work.seconds, look), watch.samples


def figures(
    policy: str,
    work: Work,
    loop: EngineLoop,
    found: tuple[SimReport, list[Sample]],
    round_: int = 0,
) -> Run:
    """The figures of a run that `execute` made."""
    report, samples = found
    outcomes = list(report.outcomes.values())
    offline = [each for each in outcomes if each.work_class is WorkClass.OFFLINE]
    counted = due(outcomes, work, report.ended_s)
    met = [_met(each, work.slo, report.ended_s) for each in counted]
    done = [each for each in offline if each.finished]
    emptied = bool(offline) and len(done) == len(work.offline)
    seconds = max(each.last_s for each in done) if emptied else report.ended_s
    stats = loop.stats()
    error = stats.prediction_errors.get("online_blocks")
    return Run(
        policy=policy,
        dataset=work.dataset,
        round=round_,
        seconds=seconds,
        emptied=emptied,
        online_requests=len(counted),
        attainment=_share(met.count("both"), len(met)),
        ttft_met=_share(met.count("both") + met.count("ttft"), len(met)),
        tpot_met=_share(met.count("both") + met.count("tpot"), len(met)),
        ttft_s=_centiles([each.ttft_s for each in counted if each.output_tokens]),
        tpot_s=_centiles([tpot for each in counted if (tpot := each.tpot_s) is not None]),
        offline_requests=len(done),
        offline_tokens=sum(map(_tokens, done)),
        hit_share=_hits(offline),
        online_hit_share=_hits([each for each in outcomes if each.work_class is WorkClass.ONLINE]),
        preemptions=stats.preemptions,
        iterations=report.iterations,
        demand_error=error.mape if error is not None and error.samples else 0.0,
        bins=_bins(offline, work.seconds),
        samples=samples,
    )


def due(outcomes: Sequence[SimOutcome], work: Work, ended_s: float) -> list[SimOutcome]:
    """Online requests that have ended, or whose first token was due before the run was over."""
    begun_s = ended_s - work.slo.ttft_s
    online_ones = [each for each in outcomes if each.work_class is WorkClass.ONLINE]
    return [each for each in online_ones if each.finished or each.arrival_s <= begun_s]


def alone(work: Work, found: tuple[SimReport, list[Sample]]) -> float:
    """Share of a run's online requests inside both objectives; all if there are none."""
    ended_s = found[0].ended_s
    counted = due(list(found[0].outcomes.values()), work, ended_s)
    missed = sum(_met(each, work.slo, ended_s) != "both" for each in counted)
    return 1.0 - _share(missed, len(counted))


def _met(found: SimOutcome, slo: Slo, ended_s: float) -> str:
    """As `Slo.met`. What has not ended is judged by its pace until then."""
    if found.error is not None or not found.output_tokens:
        return "neither"
    pace_s = (ended_s - found.first_s) / found.output_tokens
    return slo.met(found.ttft_s, (found.tpot_s or 0.0) if found.finished else pace_s)


def _tokens(found: SimOutcome) -> int:
    return found.prompt_tokens + found.output_tokens


def _hits(outcomes: Sequence[SimOutcome]) -> float:
    begun = [each for each in outcomes if each.output_tokens]
    prompts = sum(each.prompt_tokens for each in begun)
    return _share(sum(each.cached_tokens for each in begun), prompts)


def _bins(offline: Sequence[SimOutcome], seconds: float) -> list[Bin]:
    counts: list[Any] = [[0, 0, 0] for _ in range(BINS)]

    def bin_of(at_s: float) -> list[int]:
        return counts[min(BINS - 1, int(at_s / seconds * BINS))]

    for each in offline:
        if not each.output_tokens:
            continue
        begun = bin_of(each.first_s)
        begun[1] += each.prompt_tokens
        begun[2] += each.cached_tokens
        if each.finished:
            bin_of(each.last_s)[0] += _tokens(each)
    return [Bin((place + 1) * seconds / BINS, *each) for place, each in enumerate(counts)]


def _centiles(values: list[float]) -> list[float]:
    if not values:
        return []
    ordered = sorted(values)
    return [percentile(ordered, place / _CENTILES) for place in range(_CENTILES + 1)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
