"""From the options of a load to the planned workload: arrivals, lengths and trace combined.

Knows neither the command line nor HTTP. Invariant: equal options give an equal workload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

from tandem.bench import arrivals
from tandem.bench.lengths import Lengths
from tandem.bench.traces import TraceRecord, read_trace
from tandem.bench.workload import (
    Limits,
    PlannedRequest,
    Shape,
    drawn_shapes,
    plan,
    traced_shapes,
)
from tandem.core.errors import InvalidRequest


class Arrivals(StrEnum):
    """The arrival processes."""

    POISSON = "poisson"
    CONSTANT = "constant"
    BURST = "burst"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The requested load. Lengths are drawn unless a `trace` has them."""

    arrivals: Arrivals
    prompts: Lengths
    outputs: Lengths
    limits: Limits
    rate: float | None = None  # requests per second; a replayed trace is stretched to it
    time_scale: float = 1.0  # stretches a replayed trace; 2: twice as long
    trace: Path | None = None
    vocabulary: int = 1000  # prompt ids are drawn below this
    seed: int = 0


def build_workload(options: WorkloadOptions) -> list[PlannedRequest]:
    """The requests in order of arrival, at least one. Raises `InvalidRequest`."""
    if options.vocabulary < 1:
        raise InvalidRequest("the vocabulary must have a token", param="vocab_size")
    limits = options.limits
    records: list[TraceRecord] | None = None
    shapes: Iterator[Shape]
    if options.trace is not None:
        records = read_trace(options.trace, limits.max_requests)
        shapes = traced_shapes(records, limits)
    else:
        if limits.max_requests is None and _endless(options):
            raise InvalidRequest("say --max-requests or --duration, or the load never ends")
        shapes = drawn_shapes(options.prompts, options.outputs, Random(options.seed))
    times_s = _times(options, records)
    planned = plan(times_s, shapes, limits, options.vocabulary, options.seed)
    if not planned:
        raise InvalidRequest("the workload is empty: nothing arrives within the limits")
    return planned


def _endless(options: WorkloadOptions) -> bool:
    return options.limits.duration_s is None or options.arrivals is Arrivals.BURST


def _times(options: WorkloadOptions, records: list[TraceRecord] | None) -> Iterable[float]:
    if options.arrivals is Arrivals.BURST:
        return arrivals.burst()
    if options.arrivals is Arrivals.TRACE:
        return _recorded(options, records)
    if options.rate is None:
        raise InvalidRequest(f"{options.arrivals} arrivals need --rate", param="rate")
    if options.arrivals is Arrivals.CONSTANT:
        return arrivals.constant(options.rate)
    return arrivals.poisson(options.rate, Random(f"{options.seed}/arrivals"))


def _recorded(options: WorkloadOptions, records: list[TraceRecord] | None) -> list[float]:
    if records is None:
        raise InvalidRequest("--arrivals trace needs --trace FILE", param="trace")
    times_s = [record.at_s for record in records if record.at_s is not None]
    if len(times_s) < len(records):
        raise InvalidRequest(
            f"{options.trace} has lengths but no times; use --arrivals poisson --rate R"
        )
    return arrivals.replay(times_s, time_scale=options.time_scale, rate=options.rate)
