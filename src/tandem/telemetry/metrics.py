"""Prometheus metrics with the prefix `tandem_`, in their own registry.

Requests are timed where clients see them, so tokenisation and transport are included. The engine's
counters are read at each scrape. Names and meanings follow vLLM's. Invariant: every name is listed
in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tandem.core.events import EngineStats, RequestTimes
from tandem.core.sequence import FinishReason
from tandem.core.slo import DEFAULT_SLO, Slo, WorkClass

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 160.0)
_PER_TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_ITERATION_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_PREDICTION = {
    "bias": "Mean of (predicted - observed) / observed of recent predictions, by kind",
    "mape": "Mean absolute relative error of recent predictions, by kind",
    "p95": "What 95% of recent absolute relative errors were at most, by kind",
}

MAIN = "main"
"""The label of the engine that others are beside."""
_NO_OTHERS: Mapping[str, EngineStats | None] = MappingProxyType({})

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


# What an answer may have met of its objectives (`Slo.met`).
_MET = ("both", "ttft", "tpot", "neither")


class Unmet(StrEnum):
    """Why a choice neither met nor missed its objectives: it was refused because of the load, the
    server cancelled it, or the client left or sent an impossible request."""

    SHED = "shed"
    FAILED = "failed"
    LEFT = "left"


class ServerMetrics:
    """Observations of this process, and the text that Prometheus scrapes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

        def seconds(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tandem_{name}_seconds", text, registry=registry, buckets=buckets)

        self.ttft = seconds("time_to_first_token", "Arrival to first token", _TTFT_S)
        self.inter_token = seconds(
            "inter_token_latency", "Between two events of a choice", _PER_TOKEN_S
        )
        self.per_output_token = seconds(
            "request_time_per_output_token",
            "First to last token of a choice over its tokens but one, in the engine",
            _PER_TOKEN_S,
        )
        self.e2e = seconds("e2e_request_latency", "Arrival to the end of a choice", _LONG_S)
        self.queue = seconds("request_queue_time", "Arrival to first iteration", _LONG_S)
        self.finished = Counter(
            "tandem_request_success",
            "Choices by finish reason; abort: the client went away or the server gave up",
            ["finished_reason"],
            registry=registry,
        )
        self.slo = Counter(
            "tandem_slo_choices",
            "Choices by class and by which of their objectives were met, or why they have none",
            ["work_class", "met"],
            registry=registry,
        )
        # So that a rate is 0, and not missing, before the first of its kind.
        for work_class in WorkClass:
            for met in (*_MET, *Unmet):
                self.slo.labels(work_class.value, met)
        self._shed = Counter(
            "tandem_shed_requests",
            "Requests refused with 429 because of the load, by what was too much",
            ["reason"],
            registry=registry,
        )
        self.http = Counter(
            "tandem_http_requests",
            "HTTP requests by method, route and status",
            ["method", "route", "status"],
            registry=registry,
        )
        self.http_errors = Counter(
            "tandem_http_errors",
            "HTTP requests refused or failed (status 4xx, 5xx), by status",
            ["status"],
            registry=registry,
        )

    def shed(self, reason: str) -> None:
        """A request was refused because of the load."""
        self._shed.labels(reason).inc()

    def render(
        self,
        stats: EngineStats | None,
        others: Mapping[str, EngineStats | None] = _NO_OTHERS,
        may_see: Callable[[str], bool] = lambda adapter: True,
    ) -> bytes:
        """All metrics in Prometheus' text format; of adapters, those that `may_see` admits.
        `stats` is None while the engine is dead.

        If there are `others` beside the main engine, every row of an engine has the label `engine`:
        `main`, or the name of the other.
        """
        engines, server = CollectorRegistry(), CollectorRegistry()
        if others:
            engines.register(_GroupCollector({MAIN: stats, **others}))
        else:
            engines.register(_EngineCollector(stats))
        server.register(_Seen(self._registry, may_see))
        return generate_latest(server) + generate_latest(engines)


class RequestTiming:
    """Observes one core request, from arrival to the end of its choices. Times are seconds."""

    def __init__(
        self,
        metrics: ServerMetrics,
        arrival_s: float,
        slo: Slo = DEFAULT_SLO,
        work_class: WorkClass = WorkClass.ONLINE,
    ) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._slo = slo
        self._class = work_class.value
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}

    def tokens(self, index: int, now_s: float) -> None:
        """Choice `index` gained tokens."""
        if not self._last_s:
            self._metrics.ttft.observe(now_s - self._arrival_s)
        self._first_s.setdefault(index, now_s)
        if index in self._last_s:
            self._metrics.inter_token.observe(now_s - self._last_s[index])
        self._last_s[index] = now_s

    def finished(
        self,
        index: int,
        reason: FinishReason,
        output_tokens: int,
        times: RequestTimes | None,
        now_s: float,
    ) -> None:
        """Choice `index` ended. `times` are the engine's, if the engine ended the choice.

        The engine does not know when a stop string ended a choice. The times are then those at
        which tokens arrived here.
        """
        self._metrics.finished.labels(reason.value).inc()
        self._metrics.e2e.observe(now_s - self._arrival_s)
        if times is None:
            times = RequestTimes(self._arrival_s, None, self._first_s.get(index), now_s)
        if times.first_scheduled_s is not None:
            self._metrics.queue.observe(times.first_scheduled_s - times.arrival_s)
        if times.first_token_s is None:
            return
        tpot_s = 0.0
        if output_tokens > 1:
            tpot_s = (times.finished_s - times.first_token_s) / (output_tokens - 1)
            self._metrics.per_output_token.observe(tpot_s)
        if reason is not FinishReason.ERROR:
            met = self._slo.met(times.first_token_s - times.arrival_s, tpot_s)
            self._metrics.slo.labels(self._class, met).inc()

    def shed(self, choices: int) -> None:
        """This many choices were refused because of the load."""
        self._metrics.slo.labels(self._class, Unmet.SHED.value).inc(choices)

    def aborted(self, choices: int, why: Unmet) -> None:
        """This many choices were cancelled before their end."""
        self._metrics.finished.labels(FinishReason.ABORT.value).inc(choices)
        self._metrics.slo.labels(self._class, why.value).inc(choices)


class _Seen(Collector):
    """A registry without the samples of adapters that are not there for who reads it."""

    def __init__(self, registry: CollectorRegistry, may_see: Callable[[str], bool]) -> None:
        self._registry = registry
        self._may_see = may_see

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample
                for sample in metric.samples
                if "adapter" not in sample.labels or self._may_see(sample.labels["adapter"])
            ]
            yield metric


class _EngineCollector(Collector):
    """The engine's counters at one moment."""

    def __init__(self, stats: EngineStats | None) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "tandem_engine_up", "1 while the engine answers", value=float(self._stats is not None)
        )
        if self._stats is not None:
            yield from _gauges(self._stats)
            yield from _counters(self._stats)
            yield _iteration_tokens(self._stats)


class _GroupCollector(Collector):
    """The same of several engines: of each a row, in one family."""

    def __init__(self, engines: Mapping[str, EngineStats | None]) -> None:
        self._engines = engines

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for engine, stats in self._engines.items():
            label = {"engine": engine}
            for metric in _EngineCollector(stats).collect():
                rows = [row._replace(labels=label | row.labels) for row in metric.samples]
                metric.samples = []
                families.setdefault(metric.name, metric).samples.extend(rows)
        return families.values()


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    total = stats.kv_blocks_total
    values: tuple[tuple[str, str, float], ...] = (
        ("num_requests_running", "Choices that are being computed", stats.running),
        ("num_requests_waiting", "Choices that wait for their first iteration", stats.waiting),
        ("waiting_tokens", "Tokens without KV of waiting choices", stats.waiting_tokens),
        (
            "kv_cache_usage_perc",
            "KV blocks held by running choices over all blocks, 0 to 1",
            stats.kv_blocks_used / total if total else 0.0,
        ),
        ("kv_blocks_used", "KV blocks held by running choices", stats.kv_blocks_used),
        ("kv_blocks_cached", "KV blocks kept for reuse only", stats.kv_blocks_cached),
        ("kv_blocks", "KV blocks in all", total),
    )
    for name, text, value in values:
        yield GaugeMetricFamily(f"tandem_{name}", text, value=float(value))
    held = GaugeMetricFamily(
        "tandem_kv_blocks_held", "KV blocks that running work holds", labels=["work_class"]
    )
    for work_class, blocks in stats.kv_blocks_held.items():
        held.add_metric([work_class], float(blocks))
    yield held
    memory = GaugeMetricFamily(
        "tandem_memory_bytes", "Memory that the engine accounts for, by purpose", labels=["purpose"]
    )
    for purpose, num_bytes in stats.memory_bytes.items():
        memory.add_metric([purpose], float(num_bytes))
    yield memory
    for statistic, text in _PREDICTION.items():
        family = GaugeMetricFamily(f"tandem_prediction_{statistic}", text, labels=["kind"])
        for kind, error in stats.prediction_errors.items():
            if error.samples:
                family.add_metric([kind], getattr(error, statistic))
        yield family


def _counters(stats: EngineStats) -> Iterator[Metric]:
    values: tuple[tuple[str, str, float], ...] = (
        ("prefix_cache_queries", "Prompt tokens looked up", stats.prefix_queries_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the cache", stats.prefix_hits_tokens),
        ("num_preemptions", "Choices that had to give up their blocks", stats.preemptions),
        ("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated", stats.generation_tokens),
        ("iterations", "Iterations of the engine", stats.iterations),
        ("schedule_seconds", "Time spent deciding what to run", stats.schedule_s),
        ("execute_seconds", "Time spent computing", stats.execute_s),
        ("check_failures", "Accounting errors found (must stay 0)", stats.check_failures),
    )
    for name, text, value in values:
        yield CounterMetricFamily(f"tandem_{name}", text, value=float(value))
    work = CounterMetricFamily(
        "tandem_work_seconds", "Time of the iterations by kind of work", labels=["work"]
    )
    for kind, seconds in stats.work_s.items():
        work.add_metric([kind], seconds)
    yield work


def _iteration_tokens(stats: EngineStats) -> Metric:
    """Tokens of an iteration. The engine counts an iteration under its bucket's upper bound."""
    inside = [0] * (len(_ITERATION_TOKENS) + 1)
    for tokens, count in stats.iteration_tokens_hist.items():
        place = sum(bound < tokens for bound in _ITERATION_TOKENS)
        inside[place] += count
    bounds = [*(str(float(bound)) for bound in _ITERATION_TOKENS), "+Inf"]
    return HistogramMetricFamily(
        "tandem_iteration_tokens",
        "Tokens computed in one iteration",
        buckets=list(zip(bounds, accumulate(inside), strict=True)),
        sum_value=float(stats.iteration_tokens_sum),
    )
