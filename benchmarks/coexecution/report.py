"""The comparison as JSON and as a markdown page: figures, shares of the ceilings, goals.

Matrix work is counted once per training token, 4 FLOPs a weight for forward and backward to the
inputs (frozen weights need no gradient of their own), the head included; low-rank and attention
products are left out. Streaming is counted as one read of all weights an iteration, by the mean
time between tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.coexecution.figures import Sample, ratio, summary
from benchmarks.coexecution.systems import System

COLUMNS = {
    "output_tokens_per_s": "output tokens/s",
    "ttft_p50_ms": "TTFT p50, ms",
    "ttft_p99_ms": "p99",
    "tpot_mean_ms": "TPOT mean, ms",
    "tpot_p50_ms": "p50",
    "tpot_p99_ms": "p99",
    "gap_p50_ms": "between tokens p50, ms",
    "gap_p99_ms": "p99",
    "training_tokens_per_s": "training tokens/s",
    "step_ms": "a step, ms",
    "streaming_share": "weight streaming",
    "matrix_share": "matrix rate",
    "rss_gib": "RSS, GiB",
}
FLOPS_PER_WEIGHT = 4.0
# What the system under `key` has to reach, as multiples of what `peer` does in the same rounds.
GOALS = (
    ("sft", "peer-sft", "training_tokens_per_s", 2.0),
    ("dpo", "peer-dpo", "training_tokens_per_s", 2.0),
    ("fused", "pinned", "training_tokens_per_s", 2.0),
    ("fused", "pinned", "output_tokens_per_s", 1.0),
)
TPOT_GOAL = ("fused", "pinned")


@dataclass
class Measured:
    """All rounds of one model; `samples[key]` has one entry a round."""

    model: str
    streamed_bytes: int
    peer: str
    dtype: str = "bfloat16"
    data: str = "random tokens"
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    ceilings: list[dict[str, float]] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    @property
    def weights(self) -> float:
        """How many a decode step reads."""
        return self.streamed_bytes / (4 if self.dtype == "float32" else 2)

    @property
    def ceiling(self) -> dict[str, float]:
        """The best that was seen: read bandwidth in bytes/s, matrix rate in FLOP/s."""
        names = self.ceilings[0]
        return {name: max(each[name] for each in self.ceilings) for name in names}


def figures(measured: Measured, key: str) -> dict[str, float]:
    """Summary of one system with its shares of the ceilings."""
    found = summary(measured.samples[key])
    limit = measured.ceiling
    if "tpot_mean_ms" in found:
        read = measured.streamed_bytes / (found["tpot_mean_ms"] / 1e3)
        found["streaming_share"] = read / limit["read_bytes_per_s"]
    flops_per_token = FLOPS_PER_WEIGHT * measured.weights
    if "training_tokens_per_s" in found:
        rate = found["training_tokens_per_s"] * flops_per_token
        found["matrix_share"] = rate / limit["flops"]
    return found


def goals(measured: Measured) -> list[dict[str, Any]]:
    """What was to be reached and what was."""
    found: list[dict[str, Any]] = []
    for key, peer, figure, least in GOALS:
        if key in measured.samples and peer in measured.samples:
            reached = ratio(measured.samples[key], measured.samples[peer], figure)
            found.append(
                {"figure": f"{key} / {peer}, {COLUMNS[figure]}", "least": least, "is": reached}
            )
    key, peer = TPOT_GOAL
    if key in measured.samples and peer in measured.samples:
        ours, theirs = (summary(measured.samples[name])["tpot_p99_ms"] for name in TPOT_GOAL)
        name = f"{peer} / {key}, TPOT p99"
        found.append({"figure": name, "least": 1.0, "is": theirs / ours})
    return found


def as_data(machine: dict[str, object], measured: Measured, chosen: list[System]) -> dict[str, Any]:
    """Everything but the single latencies, of which the percentiles of each round are kept."""
    return {
        "machine": machine,
        "model": Path(measured.model).name,
        "dtype": measured.dtype,
        "data": measured.data,
        "flops_per_token": FLOPS_PER_WEIGHT * measured.weights,
        "streamed_bytes": measured.streamed_bytes,
        "workers": measured.workers,
        "ceilings": measured.ceiling,
        "ceiling_samples": measured.ceilings,
        "rows": [
            {
                "key": system.key,
                "system": system.title.format(peer=measured.peer),
                **figures(measured, system.key),
                "rounds": [
                    {"seconds": each.seconds, **summary([each])}
                    for each in measured.samples[system.key]
                ],
            }
            for system in chosen
        ],
        "goals": goals(measured),
    }


def as_markdown(data: dict[str, Any]) -> str:
    """One table, the goals, and what it was measured on."""
    machine = ", ".join(f"{name}: {value}" for name, value in data["machine"].items())
    limit = data["ceilings"]
    rounds = len(data["rows"][0]["rounds"])
    lines = [
        "# Serving and training on one machine",
        "",
        machine,
        "",
        f"{data['model']}, {data['dtype']}, {rounds} rounds; steps of {data['data']}. Ceilings:"
        f" reads {limit['read_bytes_per_s'] / 1e9:.1f} GB/s (an iteration streams"
        f" {data['streamed_bytes'] / 1e9:.2f} GB), matrix products"
        f" {limit['flops'] / 1e12:.2f} TFLOP/s (a training token needs"
        f" {1e-9 * data['flops_per_token']:.2f} GFLOP).",
        "",
        *(f"* {name}: {_versions(ready)}" for name, ready in data["workers"].items()),
        "",
        "| system | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for row in data["rows"]:
        cells = [_cell(name, row.get(name)) for name in COLUMNS]
        lines.append(f"| {row['system']} | " + " | ".join(cells) + " |")
    if data["goals"]:
        lines += ["", "| goal | at least | reached |", "|---|---|---|"]
    for goal in data["goals"]:
        lines.append(f"| {goal['figure']} | {goal['least']:.1f} | {goal['is']:.2f} |")
    return "\n".join(lines) + "\n"


def to_json(measured: Measured) -> dict[str, Any]:
    """What a later run needs to go on: single latencies included."""
    return asdict(measured)


def from_json(data: dict[str, Any]) -> Measured:
    """The inverse of `to_json`."""
    samples = {key: [Sample(**each) for each in rows] for key, rows in data["samples"].items()}
    return Measured(**{**data, "samples": samples})


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if name.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:.0f}" if name.endswith("_ms") else f"{value:.1f}"


def _versions(ready: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in ready["versions"].items())
