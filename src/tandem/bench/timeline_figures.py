"""Figures of simulated runs: latency distributions, the iteration timeline, occupancy over time.

matplotlib is an extra, imported when a figure is drawn. Knows what runs recorded, not how.
Invariant: the same runs give the same pictures, in PNG and SVG. Runs that are drawn together have
the same axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.bench.figures import new_figure, save
from tandem.core.slo import Slo
from tandem.sim.run import Occupancy, SimOutcome
from tandem.sim.timeline import Moment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# With more iterations than this, neighbours are drawn as one: a picture has too few pixels.
_MOST_BARS = 2000
_KINDS = ("decode", "prefill", "training")


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """What is drawn of a run. `stem` is the prefix of its files."""

    title: str
    stem: str
    outcomes: Sequence[SimOutcome]
    moments: Sequence[Moment]
    occupancy: Sequence[Occupancy]


@dataclass(frozen=True, slots=True)
class Bar:
    """Consecutive iterations: begin, end, mean duration and mean rows."""

    begin_s: float
    end_s: float
    seconds: float
    rows: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Limits:
    """Ends of the axes that all runs share."""

    ttft_s: float
    tpot_s: float
    end_s: float
    iteration_s: float
    rows: float
    sequences: float

    @staticmethod
    def of(runs: Sequence[DrawnRun], slo: Slo) -> Limits:
        """Limits wide enough for each run and for the objectives."""
        outcomes = [each for run in runs for each in run.outcomes if each.output_tokens]
        bars = [bar for run in runs for bar in bars_of(run.moments)]
        seen = [each for run in runs for each in run.occupancy]
        ends = [bar.end_s for bar in bars] + [each.at_s for each in seen]
        tpots = [tpot for each in outcomes if (tpot := each.tpot_s) is not None]
        return Limits(
            _wide([slo.ttft_s, *(each.ttft_s for each in outcomes)]),
            _wide([slo.tpot_s, *tpots]),
            max(ends, default=1.0) or 1.0,
            _wide(bar.seconds for bar in bars),
            _wide(sum(bar.rows) for bar in bars),
            _wide(max(each.running, each.waiting) for each in seen),
        )


def draw_runs(runs: Sequence[DrawnRun], slo: Slo, num_blocks: int, folder: Path) -> list[Path]:
    """Write `STEM-latency`, `STEM-timeline` and `STEM-occupancy` of each run, as .png and .svg.

    Raises `InvalidRequest` if matplotlib is missing.
    """
    limits = Limits.of(runs, slo)
    written: list[Path] = []
    for run in runs:
        pictures = {"latency": latency_cdfs(run, slo, limits)}
        if run.moments:
            pictures["timeline"] = iteration_timeline(run, limits)
        if run.occupancy:
            pictures["occupancy"] = occupancy_over_time(run, num_blocks, limits)
        for name, picture in pictures.items():
            written += save(picture, folder, f"{run.stem}-{name}")
    return written


def latency_cdfs(run: DrawnRun, slo: Slo, limits: Limits) -> Figure:
    """Shares of requests whose time to first token, and time per output token, is at most x."""
    figure = _titled(run, 3.6)
    ended = [each for each in run.outcomes if each.output_tokens]
    ttfts = sorted(each.ttft_s for each in ended)
    tpots = sorted(value for each in ended if (value := each.tpot_s) is not None)
    parts = (
        ("time to first token (s)", ttfts, slo.ttft_s, limits.ttft_s),
        ("time per output token (s)", tpots, slo.tpot_s, limits.tpot_s),
    )
    for axes, (label, values, objective, end) in zip(figure.subplots(1, 2), parts, strict=True):
        shares = [(place + 1) / len(values) for place in range(len(values))]
        axes.step(values, shares, where="post")
        axes.axvline(objective, color="#d62728", linestyle="--", linewidth=1.0)
        axes.annotate(f"objective {objective:g} s", (objective, 0.02), fontsize=8, color="#d62728")
        axes.set_xlabel(label)
        axes.set_ylabel("share of requests")
        axes.set_xlim(0.0, end)
        axes.set_ylim(0.0, 1.01)
        axes.grid(alpha=0.3)
    return figure


def iteration_timeline(run: DrawnRun, limits: Limits) -> Figure:
    """Duration and rows of iterations. Times without an iteration stay empty."""
    figure = _titled(run, 5.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    bars = bars_of(run.moments)
    times = [moment for bar in bars for moment in (bar.begin_s, bar.begin_s, bar.end_s, bar.end_s)]
    upper.fill_between(times, _edges(1e3 * bar.seconds for bar in bars), linewidth=0.0)
    upper.set_ylabel("iteration (ms)")
    upper.set_ylim(0.0, 1e3 * limits.iteration_s)
    rows = [_edges(bar.rows[kind] for bar in bars) for kind in range(len(_KINDS))]
    lower.stackplot(times, *rows, labels=_KINDS, linewidth=0.0)
    lower.set_ylabel("rows")
    lower.set_ylim(0.0, limits.rows)
    _over_time(lower, limits)
    return figure


def occupancy_over_time(run: DrawnRun, num_blocks: int, limits: Limits) -> Figure:
    """KV blocks in use, and running and waiting sequences."""
    figure = _titled(run, 5.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    times = [each.at_s for each in run.occupancy]
    upper.plot(times, [each.kv_blocks / max(1, num_blocks) for each in run.occupancy])
    upper.set_ylabel("KV blocks in use (share)")
    upper.set_ylim(0.0, 1.02)
    lower.plot(times, [each.running for each in run.occupancy], label="running")
    lower.plot(times, [each.waiting for each in run.occupancy], label="waiting")
    lower.set_ylabel("sequences")
    lower.set_ylim(0.0, limits.sequences)
    _over_time(lower, limits)
    return figure


def bars_of(moments: Sequence[Moment]) -> list[Bar]:
    """One bar per iteration, or per group of as many as a picture requires."""
    size = -(-len(moments) // _MOST_BARS) or 1
    groups = [moments[first : first + size] for first in range(0, len(moments), size)]
    return [_bar(group) for group in groups]


def _bar(group: Sequence[Moment]) -> Bar:
    count = len(group)
    return Bar(
        group[0].end_s - group[0].seconds,
        group[-1].end_s,
        sum(each.seconds for each in group) / count,
        (
            sum(each.decodes for each in group) / count,
            sum(each.prefill for each in group) / count,
            sum(each.training for each in group) / count,
        ),
    )


def _edges(heights: Iterable[float]) -> list[float]:
    """The outline of bars: up at the beginning of each, down at its end."""
    return [edge for height in heights for edge in (0.0, height, height, 0.0)]


def _wide(values: Iterable[float]) -> float:
    """The end of an axis that shows all values."""
    return 1.05 * max(values, default=1.0) or 1.0


def _titled(run: DrawnRun, height: float) -> Figure:
    figure = new_figure(9.0, height)
    figure.suptitle(run.title, fontsize=10)
    return figure


def _over_time(lower: Axes, limits: Limits) -> None:
    lower.set_xlabel("seconds")
    lower.set_xlim(0.0, limits.end_s)
    lower.legend(loc="upper right", fontsize=8)
