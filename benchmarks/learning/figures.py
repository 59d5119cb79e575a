"""Figures of the learning benchmark: win rate and CLPD over time (MACE's figure 2), averages by
retrain rate (its figure 9).

Knows reports only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.learning.report import Averages, Curve, LearningReport
from tandem.bench.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "no_retrain": "#7f7f7f",
    "ekya": "#ff7f0e",
    "adainf": "#2ca02c",
    "unified": "#1f77b4",
}
_OTHER = "#9467bd"
_LABELS = {"win_rate": "win rate", "clpd": "CLPD (nats)"}


def draw(found: LearningReport, folder: Path, stem: str) -> list[Path]:
    """Write `stem-over-time` (of the highest rate) and `stem-by-rate`, each as .png and .svg.

    Raises `InvalidRequest` if matplotlib is missing.
    """
    rate = max(found.curves)
    pictures = {
        f"{stem}-over-time": over_time(found.curves[rate], found.averages[rate], rate),
        f"{stem}-by-rate": by_rate(found.averages),
    }
    return [path for name, picture in pictures.items() for path in save(picture, folder, name)]


def over_time(curves: Mapping[str, Curve], averages: Mapping[str, Averages], rate: float) -> Figure:
    """Win rate above, CLPD below, over the seconds of a run; the averages as inset bars."""
    figure = new_figure(8.0, 6.5)
    upper, lower = figure.subplots(2, 1, sharex=True)
    of_curve: dict[str, Callable[[Curve], tuple[float, ...]]] = {
        "win_rate": lambda curve: curve.win_rate,
        "clpd": lambda curve: curve.clpd,
    }
    for axes, name in ((upper, "win_rate"), (lower, "clpd")):
        for policy, curve in curves.items():
            values = of_curve[name](curve)
            axes.plot(curve.at_s, values, label=policy, color=COLOURS.get(policy, _OTHER))
        axes.set_ylabel(_LABELS[name])
        axes.grid(alpha=0.3)
        _leave_room(axes)
        _bars(axes.inset_axes((0.72, 0.06, 0.26, 0.3)), averages, name)
    upper.legend(loc="upper left", ncols=len(curves), fontsize=8)
    upper.set_title(f"Pairs not seen before, at a retrain rate of {rate:g}", fontsize=10)
    lower.set_xlabel("seconds of serving")
    return figure


def by_rate(averages: Mapping[float, Mapping[str, Averages]]) -> Figure:
    """Average win rate and CLPD of each policy against the retrain rate."""
    figure = new_figure(9.0, 3.6)
    for axes, name in zip(figure.subplots(1, 2), _LABELS, strict=True):
        policies = dict.fromkeys(policy for each in averages.values() for policy in each)
        for policy in policies:
            points = [
                (rate, _value(each[policy], name))
                for rate, each in averages.items()
                if policy in each
            ]
            colour = COLOURS.get(policy, _OTHER)
            axes.plot(*zip(*points, strict=True), marker="o", label=policy, color=colour)
        axes.set_xlabel("retrain rate")
        axes.set_ylabel(_LABELS[name])
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    return figure


def _bars(axes: Axes, averages: Mapping[str, Averages], name: str) -> None:
    values = {policy: _value(each, name) for policy, each in averages.items()}
    colours = [COLOURS.get(policy, _OTHER) for policy in values]
    bars = axes.bar(range(len(values)), list(values.values()), color=colours)
    axes.bar_label(bars, fmt="%.3f" if name == "win_rate" else "%.1f", fontsize=6)
    low, high = min(values.values()), max(values.values())
    margin = max(0.15 * (high - low), 1e-3)
    axes.set_ylim(low - 3 * margin, high + 2 * margin)
    axes.set_xticks([])
    axes.tick_params(labelsize=6)
    axes.set_title("average", fontsize=7, pad=2)


def _leave_room(axes: Axes) -> None:
    """Space under the curves for the inset."""
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.6 * (high - low), high + 0.15 * (high - low))


def _value(averages: Averages, name: str) -> float:
    return averages.win_rate if name == "win_rate" else averages.clpd
