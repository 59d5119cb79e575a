"""The dashboard and the rules ask for metrics, labels and values that /metrics has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from tandem.core.events import EngineStats, PredictionError, Work
from tandem.core.learning import SampleState, Split
from tandem.core.slo import WorkClass
from tandem.telemetry.learning import LearningMetrics
from tandem.telemetry.lengths import LengthMetrics
from tandem.telemetry.metrics import ServerMetrics

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
STATS = EngineStats(
    kv_blocks_held={each.value: 1 for each in WorkClass},
    work_s={each.value: 1.0 for each in Work},
    memory_bytes={"weights": 1},
    prediction_errors={"forward": PredictionError(0.1, 0.1, 0.1, 5)},
)
SCRAPED = {"job", "instance"}  # Prometheus adds them
SELECTOR = re.compile(r"\b(tandem_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPED = re.compile(r"\bby \(([^)]*)\)")


def known() -> dict[str, set[str]]:
    """Names of the samples of /metrics with their labels, all of them used once."""
    registry = CollectorRegistry()
    server, learning = ServerMetrics(registry), LearningMetrics(registry)
    LengthMetrics(registry)
    server.slo.labels("online", "both").inc()
    server.shed("requests")
    server.http.labels("GET", "/", "200").inc()
    server.http_errors.labels("500").inc()
    for metric in (learning.win_rate, learning.clpd, learning.loss, learning.version):
        metric.labels("a").set(1)
    learning.samples.labels("a", Split.TRAIN.value, SampleState.ACCEPTED.value).set(1)
    learning.versions.labels("a", "published").inc()
    learning.freshness.labels("a").observe(1)
    text = server.render(STATS).decode()
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def expressions() -> list[str]:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    asked += [item["query"]["query"] for item in dashboard()["templating"]["list"][1:]]
    return [*asked, *(rule["expr"] for rule in rules())]


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_every_expression_asks_for_what_there_is(expression: str) -> None:
    metrics = known()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    own = re.sub(r"\bjob:[\w:]+", lambda m: "" if m[0] in recorded else m[0], expression)
    assert "job:" not in own, "a rule uses a figure that no rule records"
    labels: set[str] = set(SCRAPED)
    for name, matchers in SELECTOR.findall(own):
        assert name in metrics, f"/metrics has no {name}"
        asked = {label for label, _, _ in MATCHER.findall(matchers)}
        assert asked <= metrics[name] | SCRAPED, (name, asked)
        labels |= metrics[name]
    for group in GROUPED.findall(own):
        assert {label.strip() for label in group.split(",")} <= labels, group
    assert own.count("(") == own.count(")") and own.count("{") == own.count("}")


def test_values_of_labels_that_rules_name_exist() -> None:
    said = {"met": {"both", "left"}, "outcome": {"published", "refused"}, "kind": {"forward"},
            "split": {each.value for each in Split}, "state": {e.value for e in SampleState},
            "status": {"5.."}, "job": {"$job"}, "adapter": {"$adapter"}}  # fmt: skip
    for expression in expressions():
        for label, _, value in MATCHER.findall(expression):
            assert value in said[label], (label, value)


def test_panels_have_a_place_of_their_own_and_alerts_say_what_is_wrong() -> None:
    panels = dashboard()["panels"]
    places = [
        (x, y)
        for panel in panels
        for box in (panel["gridPos"],)
        for x in range(box["x"], box["x"] + box["w"])
        for y in range(box["y"], box["y"] + box["h"])
    ]
    assert len(places) == len(set(places)) and max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    for rule in rules():
        assert ("record" in rule) != ("alert" in rule)
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("info", "warning", "critical")
            assert rule["annotations"]["summary"]
