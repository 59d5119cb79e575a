"""Metrics of predicted output lengths, by predictor, in the registry of the server's others.

Invariant: every name is listed in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge


class Errors(Protocol):
    """How good a predictor was lately: `tandem.estimators.length_choice.Errors`."""

    @property
    def pinball(self) -> float:
        """Mean pinball loss in tokens."""
        ...

    @property
    def absolute(self) -> float:
        """Mean absolute error of the median in tokens."""
        ...

    @property
    def inside_50(self) -> float:
        """Share of the answers between the quantiles that should bound 50%."""
        ...

    @property
    def inside_90(self) -> float:
        """Share of the answers between the quantiles that should bound 90%."""
        ...


class LengthMetrics:
    """Gauges have what the last 128 answers say; nothing until a predictor has predicted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *more: str) -> Gauge:
            labels = ["predictor", *more]
            return Gauge(f"tandem_output_length_{name}", text, labels, registry=registry)

        self._pinball = gauge("pinball_tokens", "Mean pinball loss of the predicted quantiles")
        self._absolute = gauge("error_tokens", "Mean absolute error of the predicted median")
        self._inside = gauge("coverage", "Answers within bounds for this share", "level")
        self._forecasts = Counter(
            "tandem_output_length_forecasts",
            "Requests by the predictor that was believed; none: nothing was known",
            ["predictor"],
            registry=registry,
        )

    def predicted(self, predictor: str) -> None:
        """A request was sent with a forecast of this predictor."""
        self._forecasts.labels(predictor).inc()

    def measured(self, errors: Mapping[str, Errors]) -> None:
        """Set the gauges."""
        for predictor, each in errors.items():
            self._pinball.labels(predictor).set(each.pinball)
            self._absolute.labels(predictor).set(each.absolute)
            self._inside.labels(predictor, "0.5").set(each.inside_50)
            self._inside.labels(predictor, "0.9").set(each.inside_90)
