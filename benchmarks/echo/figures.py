"""Figures 6 to 11 of Echo from the runs of this study.

matplotlib is an extra, imported when a figure is drawn. Invariant: the same runs give the same
pictures, in PNG and SVG, and a policy has one colour in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.echo.policies import ECHO
from benchmarks.echo.pools import SOURCES
from benchmarks.echo.report import GOAL_DATASET, Setup, rows
from benchmarks.echo.runs import Run
from tandem.bench.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#7f7f7f", "#ff7f0e", "#2ca02c", "#d62728", "#1f77b4", "#9467bd", "#8c564b", "#e377c2")
# The parts of KV memory, from the bottom, with the names of `watch.Sample`'s fields.
_PARTS = {
    "held_online": ("running online", "#1f77b4"),
    "held_offline": ("running offline", "#ff7f0e"),
    "cached_read": ("cached, will be read", "#ffbb78"),
    "cached_online": ("cached online", "#aec7e8"),
    "cached_rest": ("cached, no reader", "#c7c7c7"),
    "free": ("free", "#ffffff"),
}
# The paper's window of figure 11.
_WINDOW_S = 900.0


def draw_all(setup: Setup, runs: Sequence[Run], folder: Path) -> list[tuple[str, str]]:
    """Write all figures; the name of each (without its suffix) and what it shows. Figures 7 to 11
    are of the first round with LooGLE short QA, else of the first data set.

    Raises `InvalidRequest` if matplotlib is missing.
    """
    names = list(dict.fromkeys(run.dataset for run in runs))
    chosen = GOAL_DATASET if GOAL_DATASET in names else names[0]
    own = [run for run in runs if run.dataset == chosen and not run.round]
    title = SOURCES[chosen].title if chosen in SOURCES else chosen
    pictures = {
        "speedup": ("Figure 6: offline throughput relative to the first policy", speedups(runs)),
        "latency": (f"Figure 7: TTFT and TPOT of online requests, {title}", latencies(setup, own)),
        "active": (f"Figure 8: active requests and throughput, {title}", active(own)),
        "hits": (f"Figure 9: prefix hits of offline requests, {title}", hits(own)),
        "memory": (f"Figure 10: KV memory, {title}", memory(setup, own)),
        "demand": (f"Figure 11: predicted and actual online demand, {title}", demand(own)),
    }
    for name, (_, picture) in pictures.items():
        save(picture, folder, f"{setup.stem}-{name}")
    return [(f"{setup.stem}-{name}", said) for name, (said, _) in pictures.items()]


def speedups(runs: Sequence[Run]) -> Figure:
    """Bars by data set and policy."""
    figure = new_figure(8.0, 3.6)
    axes = figure.subplots()
    found = rows(runs)
    names = list(dict.fromkeys(row.dataset for row in found))
    policies = list(dict.fromkeys(row.policy for row in found))
    width = 0.8 / len(policies)
    for place, policy in enumerate(policies):
        own = [(names.index(row.dataset), row.speedup) for row in found if row.policy == policy]
        across = [at + (place - (len(policies) - 1) / 2) * width for at, _ in own]
        bars = axes.bar(across, [up for _, up in own], width, label=policy, color=_colour(place))
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(names)), [SOURCES[n].title if n in SOURCES else n for n in names])
    axes.set_ylabel("offline tokens/s, relative")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, axis="y")
    return figure


def latencies(setup: Setup, runs: Sequence[Run]) -> Figure:
    """Distributions of both latencies, with the objectives; the legend has the attainment."""
    figure = new_figure(9.0, 3.6)
    panels = zip(
        figure.subplots(1, 2),
        ("ttft_s", "tpot_s"),
        ("time to first token (s)", "time per output token (s)"),
        setup.objectives,
        strict=True,
    )
    for axes, name, label, objective in panels:
        for place, run in enumerate(runs):
            values = getattr(run, name)
            shares = [each / max(1, len(values) - 1) for each in range(len(values))]
            said = f"{run.policy} ({run.attainment:.0%})"
            axes.plot(values, shares, label=said, color=_colour(place))
        axes.axvline(objective, color="black", linestyle="--", linewidth=1.0)
        if name == "ttft_s":
            axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("share of requests")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    return figure


def active(runs: Sequence[Run]) -> Figure:
    """Running requests of both classes, and offline tokens finished a second."""
    figure = new_figure(9.0, 6.0)
    panels = figure.subplots(3, 1, sharex=True)
    for place, run in enumerate(runs):
        minutes = [each.at_s / 60.0 for each in run.samples]
        for axes, name in zip(panels, ("online", "offline"), strict=False):
            counts = [getattr(each, name) for each in run.samples]
            axes.plot(minutes, counts, color=_colour(place), label=run.policy, linewidth=1.0)
        width = run.bins[0].end_s
        panels[2].plot(
            [(each.end_s - width / 2) / 60.0 for each in run.bins],
            [each.finished_tokens / width for each in run.bins],
            color=_colour(place),
            linewidth=1.0,
        )
    labels = ("online requests running", "offline requests running", "offline tokens/s finished")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_ylabel(label, fontsize=8)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    panels[2].set_xlabel("minutes")
    return figure


def hits(runs: Sequence[Run]) -> Figure:
    """Share of offline prompt tokens found in the cache, by the time of the first token."""
    figure = new_figure(8.0, 3.6)
    axes = figure.subplots()
    for place, run in enumerate(runs):
        points = [
            (each.end_s / 60.0, each.cached_tokens / each.prompt_tokens)
            for each in run.bins
            if each.prompt_tokens
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=_colour(place), label=run.policy)
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("minutes")
    axes.set_ylabel("offline prompt tokens from the cache")
    if axes.lines:
        axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def memory(setup: Setup, runs: Sequence[Run]) -> Figure:
    """Who has the KV blocks over time: a panel for each policy."""
    columns = min(3, len(runs))
    lines = -(-len(runs) // columns)
    figure = new_figure(4.0 * columns, 2.8 * lines + 0.4)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, run in zip(panels, runs, strict=False):
        minutes = [each.at_s / 60.0 for each in run.samples]
        shares = [[getattr(each, name) / setup.blocks for each in run.samples] for name in _PARTS]
        axes.stackplot(
            minutes,
            *shares,
            labels=[label for label, _ in _PARTS.values()],
            colors=[colour for _, colour in _PARTS.values()],
            linewidth=0.0,
        )
        axes.set_title(run.policy, fontsize=9)
        axes.set_ylim(0.0, 1.0)
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    figure.axes[0].set_ylabel("share of KV blocks")
    figure.supxlabel("minutes", fontsize=9)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8
    )
    return figure


def demand(runs: Sequence[Run]) -> Figure:
    """Blocks that online requests hold, and mu + 2 sigma before each sample, over the last minutes
    of Echo's run (else the last policy's)."""
    figure = new_figure(8.0, 3.6)
    axes = figure.subplots()
    run = next((each for each in runs if each.policy == ECHO), runs[-1])
    end_s = run.samples[-1].at_s if run.samples else 0.0
    own = [each for each in run.samples if each.at_s >= end_s - _WINDOW_S]
    minutes = [each.at_s / 60.0 for each in own]
    axes.plot(minutes, [each.demand for each in own], label="held", color=_COLOURS[4])
    axes.plot(minutes, [each.predicted for each in own], label="mu + 2 sigma", color=_COLOURS[3])
    axes.set_xlabel("minutes")
    axes.set_ylabel(f"online KV blocks, {run.policy}")
    axes.set_ylim(bottom=0.0)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _colour(place: int) -> str:
    return _COLOURS[place % len(_COLOURS)]
