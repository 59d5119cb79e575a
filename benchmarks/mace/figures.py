"""Figures of the MACE comparison: by retrain rate, by load, and in order of arrival.

matplotlib is an extra and imported when a figure is drawn. Knows figures of runs only. Invariant:
the same rows give the same pictures, in PNG and SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.mace.claims import Results
from benchmarks.mace.runs import Figures
from tandem.bench.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {
    "ekya": "#ff7f0e",
    "adainf": "#2ca02c",
    "mace": "#d62728",
    "mace/bin": "#e377c2",
    "mace/prefix": "#8c564b",
    "mace/fifo": "#9467bd",
    "unified": "#1f77b4",
}
_PANELS = {
    "throughput": "output tokens/s",
    "ttft_s": "time to first token (s)",
    "tbt_s": "time between tokens (s)",
    "fine_tune_s": "fine-tuning job (s)",
    "iteration_s": "iteration (s)",
    "utilisation": "share of the matrix ceiling",
}


def draw_mace(results: Results, folder: Path) -> list[Path]:
    """Write `mace-SCALE-rates` (figures 5, 10, 11), `mace-SCALE-loads` (figure 12) and
    `mace-SCALE-fifo` (figure 13).

    Raises `InvalidRequest` if matplotlib is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"mace-{results.scale.name}"
    written = save(by_rate(results.rates), folder, f"{stem}-rates")
    written += save(by_load(results.loads), folder, f"{stem}-loads")
    return written + save(in_order(results.fifo), folder, f"{stem}-fifo")


def by_rate(rows: Sequence[Figures]) -> Figure:
    """Every figure against the retrain rate."""
    figure = new_figure(11.0, 6.0)
    panels = figure.subplots(2, 3).flatten()
    for axes, (name, label) in zip(panels, _PANELS.items(), strict=True):
        _lines(axes, rows, "retrain_rate", name)
        axes.set_xlabel("retrain rate")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if name.endswith("_s"):
            axes.set_yscale("log")
    panels[0].legend(fontsize=7)
    return figure


def by_load(rows: Sequence[Figures]) -> Figure:
    """Attainment and throughput against the load."""
    figure = new_figure(9.0, 3.6)
    labels = {
        "attainment": "first tokens within 5 forward latencies",
        "throughput": "output tokens/s",
    }
    for axes, (name, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        _lines(axes, rows, "request_rate", name)
        axes.set_xlabel("requests/s")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    return figure


def in_order(rows: Sequence[Figures]) -> Figure:
    """Iterations and their time where all run first in, first out."""
    figure = new_figure(9.0, 3.6)
    labels = {"iterations": "iterations", "iteration_s": "iteration (s)"}
    for axes, (name, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        _lines(axes, rows, "retrain_rate", name)
        axes.set_xlabel("retrain rate")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=7)
    return figure


def _lines(axes: Axes, rows: Sequence[Figures], across: str, up: str) -> None:
    """One line for each variant that is there."""
    for variant, colour in _COLOURS.items():
        own = [row for row in rows if row.variant == variant]
        if own:
            points = [(getattr(row, across), getattr(row, up)) for row in own]
            axes.plot(*zip(*points, strict=True), marker="o", label=variant, color=colour)
