"""Metrics of learning, by adapter, in the registry of the server's other metrics.

Freshness is MACE's (3.1): the time from storing feedback to the first answer by a version that
learned from it. Invariant: every name is listed in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_FRESHNESS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0, 14400.0)
_STEP_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class LearningMetrics:
    """Observations of learning. Gauges have the last value of an adapter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *more: str) -> Gauge:
            return Gauge(f"tandem_learning_{name}", text, ["adapter", *more], registry=registry)

        self.win_rate = gauge("win_rate", "Held-out pairs that the version prefers rightly, raw")
        self.clpd = gauge("clpd", "Held-out pairs: mean log-probability difference, raw")
        self.loss = gauge("loss", "Mean loss of the last applied step")
        self.quality_drop = gauge("canary_quality_drop", "Nats a token lost on canary answers")
        self.divergence = gauge("canary_divergence", "Nats a token, answers to canary prompts")
        self.version = gauge("version", "Number of the version that answers; 0: the base")
        self.samples = gauge("samples", "Samples by split and state", "split", "state")
        self.steps = Counter(
            "tandem_learning_steps",
            "Training steps by outcome: applied, failed",
            ["adapter", "outcome"],
            registry=registry,
        )
        self.versions = Counter(
            "tandem_learning_versions",
            "Candidates by what became of them: published, held, refused, rolled_back",
            ["adapter", "outcome"],
            registry=registry,
        )
        self.freshness = Histogram(
            "tandem_learning_freshness_seconds",
            "Feedback stored to the first answer by a version that learned from it",
            ["adapter"],
            registry=registry,
            buckets=_FRESHNESS_S,
        )
        self.step_time = Histogram(
            "tandem_learning_step_seconds",
            "First to last work of a training step in the engine",
            registry=registry,
            buckets=_STEP_S,
        )

    def measured(self, adapter: str, numbers: Mapping[str, object]) -> None:
        """Set the gauges to the gate's numbers of a version."""
        for name, gauge in (
            ("win_rate", self.win_rate),
            ("clpd", self.clpd),
            ("canary_quality_drop", self.quality_drop),
            ("canary_divergence", self.divergence),
        ):
            value = numbers.get(name)
            if isinstance(value, int | float):
                gauge.labels(adapter).set(value)

    def forget(self, adapter: str) -> None:
        """Remove the gauges of a deleted adapter."""
        for gauge in (self.win_rate, self.clpd, self.loss, self.quality_drop, self.divergence):
            gauge.remove_by_labels({"adapter": adapter})
        self.version.remove_by_labels({"adapter": adapter})
        self.samples.remove_by_labels({"adapter": adapter})
