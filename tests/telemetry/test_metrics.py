"""Metrics: values that can be checked, names that are documented."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tandem.core.events import EngineStats, PredictionError, RequestTimes
from tandem.core.sequence import FinishReason
from tandem.core.slo import Slo, WorkClass
from tandem.telemetry.learning import LearningMetrics
from tandem.telemetry.lengths import LengthMetrics
from tandem.telemetry.metrics import RequestTiming, ServerMetrics, Unmet

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
STATS = EngineStats(
    running=2,
    waiting=3,
    kv_blocks_used=16,
    kv_blocks_total=64,
    prefix_queries_tokens=100,
    prefix_hits_tokens=40,
    iterations=6,
    iteration_tokens_hist={1: 2, 64: 3, 100_000: 1},
    iteration_tokens_sum=100_194,
    memory_bytes={"weights": 4096, "trainers": 0},
)


def samples(text: bytes) -> dict[str, float]:
    """Sample name with its labels -> value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def judged(metrics: ServerMetrics) -> dict[str, float]:
    """Choices by the labels of `tandem_slo_choices_total`, if there were any."""
    prefix = "tandem_slo_choices_total{"
    return {
        name.removeprefix(prefix).removesuffix("}"): value
        for name, value in samples(metrics.render(None)).items()
        if name.startswith(prefix) and value
    }


def test_engine_counters_are_shown_as_they_are() -> None:
    found = samples(ServerMetrics(CollectorRegistry()).render(STATS))
    assert found["tandem_engine_up"] == 1
    assert found["tandem_num_requests_running"] == 2
    assert found["tandem_kv_cache_usage_perc"] == 0.25
    assert found["tandem_prefix_cache_hits_total"] == 40
    assert found["tandem_iteration_tokens_bucket{le=1.0}"] == 2
    assert found["tandem_iteration_tokens_bucket{le=32.0}"] == 2
    assert found["tandem_iteration_tokens_bucket{le=64.0}"] == 5
    assert found["tandem_iteration_tokens_bucket{le=8192.0}"] == 5
    assert found["tandem_iteration_tokens_count"] == 6
    assert found["tandem_iteration_tokens_sum"] == 100_194
    memory = {name: value for name, value in found.items() if name.startswith("tandem_memory")}
    assert memory == {
        "tandem_memory_bytes{purpose=weights}": 4096,
        "tandem_memory_bytes{purpose=trainers}": 0,
    }


def test_a_dead_engine_shows_no_numbers_of_its_own() -> None:
    found = samples(ServerMetrics(CollectorRegistry()).render(None))
    assert found["tandem_engine_up"] == 0
    assert "tandem_num_requests_running" not in found
    assert "tandem_time_to_first_token_seconds_count" in found


def test_a_request_is_timed_from_arrival_to_the_end_of_each_choice() -> None:
    metrics = ServerMetrics(CollectorRegistry())
    timing = RequestTiming(metrics, arrival_s=10.0)
    timing.tokens(0, 10.5)
    timing.tokens(1, 10.6)
    timing.tokens(0, 10.75)
    times = RequestTimes(arrival_s=0.0, first_scheduled_s=0.25, first_token_s=1.0, finished_s=3.0)
    timing.finished(0, FinishReason.STOP, 5, times, 11.0)
    timing.finished(1, FinishReason.LENGTH, 1, None, 12.0)
    timing.aborted(2, Unmet.LEFT)
    found = samples(metrics.render(None))
    assert found["tandem_time_to_first_token_seconds_count"] == 1
    assert found["tandem_time_to_first_token_seconds_sum"] == 0.5
    assert found["tandem_inter_token_latency_seconds_count"] == 1
    assert found["tandem_inter_token_latency_seconds_sum"] == 0.25
    assert found["tandem_e2e_request_latency_seconds_sum"] == pytest.approx(3.0)
    assert found["tandem_request_queue_time_seconds_sum"] == 0.25
    assert found["tandem_request_time_per_output_token_seconds_sum"] == 0.5
    assert found["tandem_request_success_total{finished_reason=stop}"] == 1
    assert found["tandem_request_success_total{finished_reason=abort}"] == 2


@pytest.mark.parametrize(
    ("ttft_s", "output_tokens", "met"),
    [(0.9, 5, "both"), (1.5, 5, "tpot"), (0.9, 2, "ttft"), (1.5, 2, "neither"), (0.9, 1, "both")],
)
def test_a_choice_counts_by_the_objectives_that_it_met(ttft_s, output_tokens, met) -> None:
    metrics = ServerMetrics(CollectorRegistry())
    timing = RequestTiming(metrics, 10.0, Slo(1.0, 0.1), WorkClass.OFFLINE)
    times = RequestTimes(5.0, 5.1, 5.0 + ttft_s, 5.0 + ttft_s + 0.3)
    timing.finished(0, FinishReason.STOP, output_tokens, times, 20.0)
    timing.finished(0, FinishReason.ERROR, output_tokens, times, 20.0)
    assert judged(metrics) == {f"met={met},work_class=offline": 1}


@pytest.mark.parametrize(
    ("ttft_s", "seconds", "met"),
    [(0.9, 0.3, "both"), (1.5, 0.3, "tpot"), (0.9, 0.5, "ttft"), (1.5, 0.5, "neither")],
)
def test_what_the_engine_did_not_end_counts_by_when_its_tokens_came(ttft_s, seconds, met) -> None:
    metrics = ServerMetrics(CollectorRegistry())
    timing = RequestTiming(metrics, 10.0, Slo(1.0, 0.1))
    timing.tokens(0, 10.1)
    timing.tokens(1, 10.0 + ttft_s)
    timing.tokens(1, 10.0 + ttft_s + seconds)
    timing.finished(1, FinishReason.STOP, 5, None, 10.0 + ttft_s + seconds)
    assert judged(metrics) == {f"met={met},work_class=online": 1}


def test_what_has_no_objectives_to_judge_counts_by_why() -> None:
    metrics = ServerMetrics(CollectorRegistry())
    timing = RequestTiming(metrics, 10.0)
    timing.shed(3)
    timing.aborted(2, Unmet.FAILED)
    timing.aborted(1, Unmet.LEFT)
    counts = {"shed": 3.0, "failed": 2.0, "left": 1.0}
    assert judged(metrics) == {f"met={why},work_class=online": n for why, n in counts.items()}


def test_a_rate_is_zero_before_the_first_choice_of_its_kind() -> None:
    found = samples(ServerMetrics(CollectorRegistry()).render(None))
    assert found["tandem_slo_choices_total{met=both,work_class=online}"] == 0.0
    assert found["tandem_slo_choices_total{met=shed,work_class=offline}"] == 0.0


def test_prediction_errors_are_shown_by_kind_once_there_are_any() -> None:
    errors = {
        "forward": PredictionError(-0.02, 0.05, 0.15, 40),
        "update": PredictionError(math.nan, math.nan, math.nan, 0),
    }
    found = samples(
        ServerMetrics(CollectorRegistry()).render(EngineStats(prediction_errors=errors))
    )
    assert found["tandem_prediction_bias{kind=forward}"] == -0.02
    assert found["tandem_prediction_mape{kind=forward}"] == 0.05
    assert found["tandem_prediction_p95{kind=forward}"] == 0.15
    assert "tandem_prediction_p95{kind=update}" not in found


def test_every_metric_is_documented_and_nothing_else() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)
    LearningMetrics(registry)
    LengthMetrics(registry)
    families = text_string_to_metric_families(metrics.render(STATS).decode())
    served = {family.name: family.type for family in families}
    served = {name: kind for name, kind in served.items() if not name.endswith("_created")}
    rows = re.findall(r"^\| `(tandem_\w+)` \| (\w+) \|", DOCS.read_text(), re.MULTILINE)
    documented = {
        name.removesuffix("_total") if kind == "counter" else name: kind for name, kind in rows
    }
    assert documented == served
