"""The comparison as JSON and as a markdown page."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.comparison import Comparison
from benchmarks.peers.jobs import JOBS, Job, medians

FIGURES = {
    "prefill": "prompt tokens/s",
    "total": "output tokens/s, prefill included",
    "decode": "decode only, tokens/s",
}


def as_data(machine: dict[str, object], comparisons: list[Comparison], ours: str) -> dict[str, Any]:
    """Everything, samples included."""
    return {
        "machine": machine,
        "models": [
            {
                "model": each.model,
                "streamed_bytes": each.streamed_bytes,
                "prefill_flops": each.prefill_flops,
                "workers": each.workers,
                "idle_cpu_s": each.idle_cpu_s,
                "ceilings": medians(each.ceilings),
                "ceiling_samples": each.ceilings,
                "rows": [_row(each, job, figure, ours) for job, figure in _rows(each)],
                "samples": each.samples,
            }
            for each in comparisons
        ],
    }


def as_markdown(data: dict[str, Any], ours: str) -> str:
    """One table a model: medians, shares of the ceiling, ratios."""
    machine = ", ".join(f"{name}: {value}" for name, value in data["machine"].items())
    parts = ["# Speed beside other engines", "", machine, ""]
    for model in data["models"]:
        parts += _model_section(model, ours)
    return "\n".join(parts) + "\n"


def _rows(comparison: Comparison) -> list[tuple[Job, str]]:
    jobs = [job for job in JOBS if job.name in comparison.samples]
    return [
        (job, figure)
        for job in jobs
        for figure in next(iter(comparison.samples[job.name].values()))[0]
    ]


def _row(comparison: Comparison, job: Job, figure: str, ours: str) -> dict[str, Any]:
    engines = list(comparison.workers)
    peers = [name for name in engines if name != ours] if ours in engines else []
    return {
        "job": job.name,
        "figure": figure,
        "tokens_per_s": {name: comparison.median(job.name, name)[figure] for name in engines},
        "ceiling_share": {name: comparison.share(job, figure, name) for name in engines},
        "ratio": {peer: comparison.ratio(job.name, figure, ours, peer) for peer in peers},
    }


def _model_section(model: dict[str, Any], ours: str) -> list[str]:
    engines = list(model["workers"])
    peers = list(model["rows"][0]["ratio"])
    ceilings = model["ceilings"]
    steps = ceilings["read_bytes_per_s"] / model["streamed_bytes"]
    head = ["job", "figure", *engines, *(f"{ours} / {peer}" for peer in peers)]
    lines = [
        f"## {model['model']}, bfloat16 weights",
        "",
        f"Ceilings: reads {ceilings['read_bytes_per_s'] / 1e9:.1f} GB/s, so at most {steps:.1f}"
        f" steps/s of {model['streamed_bytes'] / 1e9:.2f} GB; matrix products"
        f" {ceilings['flops'] / 1e12:.2f} TFLOP/s. In brackets: share of the ceiling (matrix rate"
        " for prefill, weight streaming for the rest).",
        "",
        *(f"* {name}: {_versions(model['workers'][name])}" for name in engines),
        "",
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
    ]
    for row in model["rows"]:
        cells = [
            f"{row['tokens_per_s'][name]:.1f} ({row['ceiling_share'][name]:.0%})"
            for name in engines
        ]
        ratios = [f"{row['ratio'][peer]:.2f}" for peer in peers]
        lines.append(
            "| " + " | ".join([row["job"], FIGURES[row["figure"]], *cells, *ratios]) + " |"
        )
    idle = ", ".join(f"{name} {value:.2f} s" for name, value in model["idle_cpu_s"].items())
    return [*lines, "", f"CPU time used while stopped for the others: {idle}.", ""]


def _versions(ready: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in ready["versions"].items())
