"""Figures of a simulated run: latency distributions, the iteration timeline, occupancy over time.

matplotlib is an extra and imported when a figure is drawn. Knows what a run recorded, not how.
Invariant: the same run gives the same pictures, in PNG and SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.bench.figures import new_figure, save
from tandem.sim.run import Occupancy, SimOutcome
from tandem.sim.timeline import Moment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A timeline of more iterations than this is thinned, or no picture could show it.
_MOST_MOMENTS = 2000


def draw_run(
    outcomes: Sequence[SimOutcome],
    moments: Sequence[Moment],
    occupancy: Sequence[Occupancy],
    num_blocks: int,
    folder: Path,
    stem: str,
) -> list[Path]:
    """Write `stem-latency`, `stem-timeline` and `stem-occupancy`, each as .png and .svg.

    Raises `InvalidRequest` if matplotlib is missing.
    """
    pictures = {f"{stem}-latency": latency_cdfs(outcomes)}
    if moments:
        pictures[f"{stem}-timeline"] = iteration_timeline(moments)
    if occupancy:
        pictures[f"{stem}-occupancy"] = occupancy_over_time(occupancy, num_blocks)
    return [path for name, picture in pictures.items() for path in save(picture, folder, name)]


def latency_cdfs(outcomes: Sequence[SimOutcome]) -> Figure:
    """Shares of requests whose time to first token, and per output token, is at most x."""
    figure = new_figure(9.0, 3.6)
    ended = [each for each in outcomes if each.output_tokens]
    series = {
        "time to first token (s)": sorted(each.ttft_s for each in ended),
        "time per output token (s)": sorted(
            value for each in ended if (value := each.tpot_s) is not None
        ),
    }
    for axes, (label, values) in zip(figure.subplots(1, 2), series.items(), strict=True):
        shares = [(place + 1) / len(values) for place in range(len(values))]
        axes.step(values, shares, where="post")
        axes.set_xlabel(label)
        axes.set_ylabel("share of requests")
        axes.set_ylim(0.0, 1.01)
        axes.grid(alpha=0.3)
    return figure


def iteration_timeline(moments: Sequence[Moment]) -> Figure:
    """How long iterations took, and what their rows were."""
    figure = new_figure(9.0, 5.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    shown = moments[:: max(1, len(moments) // _MOST_MOMENTS)]
    times = [moment.end_s for moment in shown]
    upper.plot(times, [1e3 * moment.seconds for moment in shown], linewidth=0.6)
    upper.set_ylabel("iteration (ms)")
    lower.stackplot(
        times,
        [moment.decodes for moment in shown],
        [moment.prefill for moment in shown],
        [moment.training for moment in shown],
        labels=("decode", "prefill", "training"),
    )
    lower.set_ylabel("rows")
    lower.set_xlabel("seconds")
    lower.legend(loc="upper right", fontsize=8)
    return figure


def occupancy_over_time(occupancy: Sequence[Occupancy], num_blocks: int) -> Figure:
    """KV blocks in use, and sequences that run and wait."""
    figure = new_figure(9.0, 5.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    times = [each.at_s for each in occupancy]
    upper.plot(times, [each.kv_blocks / max(1, num_blocks) for each in occupancy])
    upper.set_ylabel("KV blocks in use (share)")
    upper.set_ylim(0.0, 1.02)
    lower.plot(times, [each.running for each in occupancy], label="running")
    lower.plot(times, [each.waiting for each in occupancy], label="waiting")
    lower.set_ylabel("sequences")
    lower.set_xlabel("seconds")
    lower.legend(loc="upper right", fontsize=8)
    return figure
