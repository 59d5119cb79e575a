"""The figures of a run as JSON and as a table for people.

Knows the fields of `Summary`, not how it was made. Invariant: `SCHEMA` changes when a field changes
its meaning or is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tandem.bench.measure import Distribution, Outcome, Summary

SCHEMA = "tandem-bench-1"
LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between two events",
    "e2e": "end to end",
    "client_lag": "client lag",
}


def as_json(
    options: Mapping[str, Any], summary: Summary, outcomes: Sequence[Outcome] | None = None
) -> bytes:
    """One JSON object: `schema`, `options`, `summary`, `client_fell_behind` and, if given,
    `requests`."""
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "options": dict(options),
        "summary": msgspec.to_builtins(summary),
        "client_fell_behind": summary.client_fell_behind,
    }
    if outcomes is not None:
        report["requests"] = msgspec.to_builtins(outcomes)
    return msgspec.json.format(msgspec.json.encode(report, enc_hook=str), indent=2) + b"\n"


def as_table(summary: Summary) -> RenderableType:
    """Totals, then one row per latency, then warnings."""
    parts: list[RenderableType] = [_totals(summary), _latencies(summary)]
    if not summary.usage_reported:
        parts.append(Text("output tokens were counted as events: no usage was reported"))
    if summary.client_fell_behind:
        parts.append(
            Text("the load generator fell behind: requests left late, lower the rate", style="red")
        )
    return Group(*parts)


def _totals(summary: Summary) -> Table:
    table = Table("figure", "value", show_header=False)
    table.add_row("requests complete", f"{summary.completed} of {summary.requests}")
    for kind, count in sorted(summary.errors.items()):
        table.add_row(f"failed: {kind}", str(count))
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    table.add_row("prompt tokens", str(summary.prompt_tokens))
    table.add_row("output tokens", str(summary.output_tokens))
    table.add_row("requests/s", f"{summary.request_rate:.3f}")
    table.add_row("output tokens/s", f"{summary.output_token_rate:.2f}")
    if summary.goodput_rate is not None and summary.goodput_share is not None:
        share = f"{summary.goodput_share:.1%} of all"
        table.add_row("goodput", f"{summary.goodput_rate:.3f} requests/s ({share})")
    if summary.intended_arrival_rate is not None and summary.achieved_arrival_rate is not None:
        rates = f"{summary.intended_arrival_rate:.3f} / {summary.achieved_arrival_rate:.3f}"
        table.add_row("arrivals/s intended / achieved", rates)
    return table


def _latencies(summary: Summary) -> Table:
    table = Table("milliseconds", "mean", "p50", "p90", "p95", "p99", "max")
    values: dict[str, Distribution | None] = {
        "ttft": summary.ttft,
        "tpot": summary.tpot,
        "itl": summary.itl,
        "e2e": summary.e2e,
        "client_lag": summary.client_lag,
    }
    for name, value in values.items():
        if value is not None:
            cells = (value.mean, value.p50, value.p90, value.p95, value.p99, value.max)
            table.add_row(LATENCIES[name], *(f"{1e3 * cell:.1f}" for cell in cells))
    return table
