"""From the outcomes of requests to the figures of a report.

Pure arithmetic; knows nothing of HTTP. Latencies count from the intended arrival, so a late client
or a stalled server cannot hide them (no coordinated omission). Invariant: times of an outcome are
seconds since the load began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tandem.core.slo import Slo

# Above this, the load generator and not the server determined the arrivals.
CLIENT_LAG_LIMIT_S = 0.05


@dataclass(slots=True)
class Outcome:
    """What happened to one request."""

    index: int
    intended_s: float  # planned arrival
    sent_s: float
    output_s: list[float] = field(default_factory=list)  # arrival of every event with output
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0  # the server's count, or the number of events
    usage_reported: bool = False  # token counts are the server's
    # `connect`, `timeout`, `http 429`, `stream`, `truncated` ...; None: complete
    error: str | None = None
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the intended arrival to the first output."""
        return self.output_s[0] - self.intended_s if self.output_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds from first to last output per token after the first; None below two tokens."""
        if self.output_tokens < 2 or not self.output_s:
            return None
        return (self.output_s[-1] - self.output_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """Seconds from the intended arrival to the end of the answer."""
        return self.ended_s - self.intended_s

    def meets(self, slo: Slo) -> bool:
        """True if complete and within both objectives. An answer of one token has no TPOT."""
        if self.error is not None or self.ttft_s is None:
            return False
        return self.ttft_s <= slo.ttft_s and (self.tpot_s or 0.0) <= slo.tpot_s


@dataclass(frozen=True, slots=True)
class Distribution:
    """One latency, in seconds. Percentiles interpolate linearly between samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Rates are per second of `duration_s` (load begin to last end).

    A latency is None if no complete request has it. Failed requests count in `errors` only.
    """

    requests: int
    completed: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    usage_reported: bool
    request_rate: float
    output_token_rate: float
    goodput_rate: float | None
    goodput_share: float | None
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    client_lag: Distribution | None
    intended_arrival_rate: float | None
    achieved_arrival_rate: float | None

    @property
    def client_fell_behind(self) -> bool:
        """True if requests were sent late, so the load was not the requested one."""
        return self.client_lag is not None and self.client_lag.p99 > CLIENT_LAG_LIMIT_S


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `ordered` lies. `ordered` is not empty."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(values: Sequence[float]) -> Distribution | None:
    """The distribution of `values`, or None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return Distribution(
        count=len(ordered),
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 0.50),
        p90=percentile(ordered, 0.90),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def summarise(outcomes: Sequence[Outcome], slo: Slo | None = None) -> Summary:
    """The figures of a run. Goodput needs an `slo`."""
    complete = [outcome for outcome in outcomes if outcome.error is None]
    duration_s = max((outcome.ended_s for outcome in outcomes), default=0.0)
    output_tokens = sum(outcome.output_tokens for outcome in complete)
    good = None if slo is None else sum(outcome.meets(slo) for outcome in outcomes)
    return Summary(
        requests=len(outcomes),
        completed=len(complete),
        errors=dict(Counter(o.error for o in outcomes if o.error is not None)),
        duration_s=duration_s,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in complete),
        output_tokens=output_tokens,
        usage_reported=all(outcome.usage_reported for outcome in complete),
        request_rate=_over(len(complete), duration_s),
        output_token_rate=_over(output_tokens, duration_s),
        goodput_rate=None if good is None else _over(good, duration_s),
        goodput_share=None if good is None else _over(good, len(outcomes)),
        ttft=distribution([o.ttft_s for o in complete if o.ttft_s is not None]),
        tpot=distribution([o.tpot_s for o in complete if o.tpot_s is not None]),
        itl=distribution([b - a for o in complete for a, b in pairwise(o.output_s)]),
        e2e=distribution([outcome.e2e_s for outcome in complete]),
        client_lag=distribution([o.sent_s - o.intended_s for o in outcomes]),
        intended_arrival_rate=_rate([outcome.intended_s for outcome in outcomes]),
        achieved_arrival_rate=_rate([outcome.sent_s for outcome in outcomes]),
    )


def _over(amount: float, whole: float) -> float:
    return amount / whole if whole > 0.0 else 0.0


def _rate(times_s: list[float]) -> float | None:
    """Mean rate of arrivals; None if all are at the same time."""
    span_s = max(times_s, default=0.0) - min(times_s, default=0.0)
    return (len(times_s) - 1) / span_s if span_s > 0.0 else None
