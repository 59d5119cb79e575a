"""Online requests: a recorded trace's times, with the lengths of chats, and how fast to replay it.

Knows no engine: the caller says what share of a load met its objectives. Invariant: two rates give
the same requests at other times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.echo.pools import chats
from tandem.bench.arrivals import replay
from tandem.bench.capacity import peak
from tandem.bench.traces import read_trace
from tandem.bench.workload import PlannedRequest
from tandem.core.errors import InvalidRequest
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.sim.run import Arrival

TRACE = Path("traces") / "azure_llm_2023_conv.csv.gz"
# The search for a rate ends when it is known within this share.
_NEAR = 0.04
Load = list[PlannedRequest]


def load(data: Path, rate: float, seconds: float, scale: float, vocabulary: int) -> Load:
    """The middle of the trace, `seconds` of it if all is replayed at `rate` requests/s on average.
    It begins at 0. Raises `InvalidRequest` if nothing arrives."""
    times_s = replay([record.at_s or 0.0 for record in read_trace(data / TRACE)], rate=rate)
    first_s = max(0.0, (times_s[-1] - seconds) / 2.0)
    at_s = [each - first_s for each in times_s if first_s <= each < first_s + seconds]
    if not at_s:
        raise InvalidRequest(f"at {rate:g} requests/s nothing arrives in {seconds:g} s")
    made = chats(len(at_s), scale, vocabulary, "online")
    return [
        PlannedRequest(number, arrival_s, *each)
        for number, (arrival_s, each) in enumerate(zip(at_s, made, strict=True))
    ]


def arrivals(load: Load) -> list[Arrival]:
    """As the engine takes them."""
    found = []
    for each in load:
        sampling = SamplingParams(max_tokens=each.output_tokens, temperature=0.0, ignore_eos=True)
        found.append(Arrival(each.at_s, Request(f"online-{each.index}", each.prompt, sampling)))
    return found


def highest_rate(
    attained: Callable[[Load], float],
    load_at: Callable[[float], Load],
    *,
    wanted: float,
    peak_s: float,
    first: float = 1.0,
) -> tuple[float, dict[float, float]]:
    """The highest rate at which the busiest `peak_s` seconds attain the `wanted` share (Echo 5.4,
    step 1), and what was tried. By doubling or halving, then by halves in between."""
    tried: dict[float, float] = {}

    def holds(rate: float) -> bool:
        tried[rate] = attained(peak(load_at(rate), peak_s))
        return tried[rate] >= wanted

    low = high = first
    if holds(first):
        while holds(high := 2.0 * low):
            low = high
    else:
        while not holds(low := high / 2.0):
            high = low
    while high - low > _NEAR * low:
        middle = (low + high) / 2.0
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, tried
