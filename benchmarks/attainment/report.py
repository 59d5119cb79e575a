"""The measurements as JSON and as a markdown page: the set-up, a table a load, the goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.attainment.figures import (
    BASELINE,
    MARGIN,
    OURS,
    Measurement,
    Unloaded,
    gap,
    pairs,
    summary,
    verdict,
)
from tandem.bench.measure import CLIENT_LAG_LIMIT_S
from tandem.core.slo import Slo

COLUMNS = (
    "policy",
    "attainment",
    "TTFT met",
    "TPOT met",
    f"less {BASELINE}, points (95%)",
    "by round",
    "TTFT p50 / p99, ms",
    "TPOT p50 / p99, ms",
    "output tokens/s",
    "training tokens/s",
    "unfinished",
)


@dataclass
class Setup:
    """What the windows have in common."""

    machine: dict[str, object]
    versions: dict[str, str]
    model: str
    dtype: str
    slo: Slo
    unloaded: Unloaded
    capacity: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    seconds: float
    policies: dict[str, dict[str, str]] = field(default_factory=dict)
    profile: str = ""
    sequence_tokens: int = 512


def as_data(setup: Setup, windows: Sequence[Measurement]) -> dict[str, Any]:
    """Everything but the single requests."""
    rows = [
        _row(setup, policy, load, windows)
        for load in sorted({each.load for each in windows})
        for policy in setup.policies
        if any(each.policy == policy and each.load == load for each in windows)
    ]
    verdicts = [verdict(load, windows, setup.slo) for load in sorted({w.load for w in windows})]
    return {
        **asdict(setup),
        "rows": rows,
        "goals": [asdict(each) for each in verdicts if each is not None],
    }


def _row(setup: Setup, policy: str, load: float, windows: Sequence[Measurement]) -> dict[str, Any]:
    chosen = [each for each in windows if each.load == load]
    own = [each for each in chosen if each.policy == policy]
    baseline = [each for each in chosen if each.policy == BASELINE]
    row: dict[str, Any] = {
        "policy": policy,
        "load": load,
        "rate": load * setup.capacity,
        **summary(own, setup.slo),
        "rounds": [
            {
                "round": each.round,
                **summary([each], setup.slo),
                "others": each.others,
                **each.stats,
                "prediction_errors": each.prediction_errors,
            }
            for each in own
        ],
    }
    if policy != BASELINE and (paired := pairs(own, baseline, setup.slo)):
        row["gap"] = asdict(gap(paired))
        row["gap_by_round"] = [
            gap(found).value for each in own if (found := pairs([each], baseline, setup.slo))
        ]
    return row


def as_markdown(data: dict[str, Any]) -> str:
    """A table for each load, the goals, and what it was measured on."""
    machine = ", ".join(f"{name}: {value}" for name, value in data["machine"].items())
    slo, alone = data["slo"], data["unloaded"]
    requests = sum(row["requests"] for row in data["rows"])
    options = ", ".join(
        f"{policy} {name}={value}"
        for policy, chosen in data["policies"].items()
        for name, value in chosen.items()
    )
    lines = [
        "# SLO attainment and training throughput by policy",
        "",
        machine,
        "",
        f"{data['model']}, {data['dtype']}; {_versions(data['versions'])}. Capacity"
        f" {data['capacity']:.2f} requests/s of {data['mean_prompt_tokens']:.0f} prompt and"
        f" {data['mean_output_tokens']:.0f} output tokens on average. A request alone: TTFT"
        f" {1e3 * alone['ttft_s']:.0f} ms, TPOT {1e3 * alone['tpot_s']:.1f} ms (medians)."
        f" Objectives: TTFT {1e3 * slo['ttft_s']:.0f} ms, TPOT {1e3 * slo['tpot_s']:.1f} ms."
        f" {requests} requests in windows of {data['seconds']:.0f} s."
        f" A training step: 2 x {data['sequence_tokens']} tokens."
        + (f" The engines start from a profile, {data['profile']}." if data.get("profile") else "")
        + (f" Policy options: {options}." if options else ""),
    ]
    for load in sorted({row["load"] for row in data["rows"]}):
        rows = [row for row in data["rows"] if row["load"] == load]
        lines += [
            "",
            f"## {load:.0%} of capacity: {rows[0]['rate']:.2f} requests/s",
            "",
            _counts(rows),
            "",
            "| " + " | ".join(COLUMNS) + " |",
            "|---" * len(COLUMNS) + "|",
            *(f"| {' | '.join(_cells(row))} |" for row in rows),
        ]
    if data["goals"]:
        lines += ["", f"## Goals of `{OURS}`", "", *_goals(data["goals"])]
    late = max((row.get("client_lag_p99_ms", 0.0) for row in data["rows"]), default=0.0)
    others = [each["others"] for row in data["rows"] for each in row["rounds"]]
    lines += [
        "",
        f"Requests left at most {late:.1f} ms late (99th percentile of the worst row). Other"
        f" processes took {median(others):.0%} of the cores in the median window,"
        f" {max(others):.0%} in the worst.",
    ]
    if late > 1e3 * CLIENT_LAG_LIMIT_S:
        lines.append("**The load generator fell behind: the load was not the one intended.**")
    return "\n".join(lines) + "\n"


def _counts(rows: Sequence[dict[str, Any]]) -> str:
    by_rounds: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_rounds.setdefault(len(row["rounds"]), []).append(row)
    if len(by_rounds) == 1:
        return f"{rows[0]['requests']} requests a policy, {len(rows[0]['rounds'])} rounds."
    parts = [
        f"{found[0]['requests']} requests in {rounds} round{'s' * (rounds > 1)} of "
        + ", ".join(f"`{row['policy']}`" for row in found)
        for rounds, found in by_rounds.items()
    ]
    return "; ".join(parts) + "."


def _cells(row: dict[str, Any]) -> list[str]:
    apart = row.get("gap")
    between = f"{_points(apart['value'])} ({_range(apart)})" if apart else ""
    return [
        f"`{row['policy']}`",
        *(f"{row[name]:.1%}" for name in ("attainment", "ttft_attainment", "tpot_attainment")),
        between,
        ", ".join(_points(value) for value in row.get("gap_by_round", [])),
        _latency(row, "ttft", 0),
        _latency(row, "tpot", 1),
        f"{row['output_tokens_per_s']:.0f}",
        f"{row['training_tokens_per_s']:.0f}",
        str(row["unfinished"]),
    ]


def _goals(goals: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"| load | attainment less {BASELINE}'s | within {1e2 * MARGIN:.0f} point |"
        " training tokens/s | others within it | above them |",
        "|---|---|---|---|---|---|",
    ]
    for goal in goals:
        rivals = ", ".join(f"`{name}` {rate:.0f}" for name, rate in goal["rivals"].items())
        within = "no" if not goal["within"] else "yes, surely" if goal["sure"] else "yes"
        ahead = "yes" if goal["ahead"] else "no"
        if not goal["rivals"] and not goal["training_tokens_per_s"]:
            ahead = "-"  # nobody trained
        lines.append(
            f"| {goal['load']:.0%} | {_points(goal['interval']['value'])}"
            f" ({_range(goal['interval'])}) | {within} | {goal['training_tokens_per_s']:.0f} |"
            f" {rivals or 'none'} | {ahead} |"
        )
    return lines


def _points(share: float) -> str:
    return f"{1e2 * share:+.1f}"


def _range(interval: dict[str, float]) -> str:
    return f"{_points(interval['low'])} to {_points(interval['high'])}"


def _latency(row: dict[str, Any], name: str, digits: int) -> str:
    if f"{name}_p50_ms" not in row:
        return ""
    return f"{row[f'{name}_p50_ms']:.{digits}f} / {row[f'{name}_p99_ms']:.{digits}f}"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
