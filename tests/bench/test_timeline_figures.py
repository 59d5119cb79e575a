"""Pictures of simulated runs: titles, the same axes, iterations as bars."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.bench.timeline_figures import (
    DrawnRun,
    Limits,
    bars_of,
    draw_runs,
    iteration_timeline,
    latency_cdfs,
    occupancy_over_time,
)
from tandem.core.slo import Slo
from tandem.sim.run import Occupancy, SimOutcome
from tandem.sim.timeline import Moment

pytest.importorskip("matplotlib")
SLO = Slo(2.0, 0.1)


def moment(begin_s: float, seconds: float, rows: int) -> Moment:
    return Moment(begin_s + seconds, seconds, rows, 2 * rows, 0, 0, 0)


def outcome(ttft_s: float) -> SimOutcome:
    return SimOutcome("r", 0.0, 8, None, ttft_s, ttft_s + 1.0, 11)


def drawn(name: str, scale: float) -> DrawnRun:
    return DrawnRun(
        f"{name} on a device",
        name,
        [outcome(0.5 * scale), outcome(scale)],
        [moment(0.0, 0.5 * scale, 4), moment(3.0 * scale, scale, int(8 * scale))],
        [Occupancy(scale, int(3 * scale), 1, 5)],
    )


def test_an_iteration_is_a_bar_with_nothing_where_none_ran() -> None:
    run = drawn("a", 1.0)
    figure = iteration_timeline(run, Limits.of([run], SLO))
    upper, lower = figure.axes
    (filled,) = upper.collections
    corners = {tuple(map(float, corner)) for corner in filled.get_paths()[0].vertices}
    assert {(0.0, 500.0), (0.5, 500.0), (3.0, 1000.0), (4.0, 1000.0)} <= corners
    assert {(0.5, 0.0), (3.0, 0.0)} <= corners  # idle between them
    assert [text.get_text() for text in lower.get_legend().get_texts()] == [
        "decode",
        "prefill",
        "training",
    ]


def test_many_iterations_are_drawn_as_means_of_neighbours() -> None:
    moments = [moment(2.0 * place, 1.0, place % 2) for place in range(5000)]
    bars = bars_of(moments)
    assert len(bars) <= 2000
    assert bars[0].begin_s == 0.0 and bars[-1].end_s == moments[-1].end_s
    assert all(bar.seconds == pytest.approx(1.0) for bar in bars)
    assert sum(bar.rows[0] for bar in bars) / len(bars) == pytest.approx(0.5, rel=0.01)
    assert bars_of([]) == []


def test_runs_that_are_drawn_together_have_the_same_axes_and_their_own_titles() -> None:
    runs = [drawn("small", 1.0), drawn("large", 4.0)]
    limits = Limits.of(runs, SLO)
    for draw in (
        lambda run: latency_cdfs(run, SLO, limits),
        lambda run: iteration_timeline(run, limits),
        lambda run: occupancy_over_time(run, 10, limits),
    ):
        small, large = (draw(run) for run in runs)
        assert [axes.get_xlim() for axes in small.axes] == [axes.get_xlim() for axes in large.axes]
        assert [axes.get_ylim() for axes in small.axes] == [axes.get_ylim() for axes in large.axes]
        assert small.get_suptitle() == "small on a device"
    alone = Limits.of(runs[:1], SLO)
    assert alone.end_s < limits.end_s
    # An objective is shown even where all requests are far inside it.
    assert alone.ttft_s > SLO.ttft_s
    shown = [text.get_text() for text in latency_cdfs(runs[0], SLO, alone).axes[0].texts]
    assert shown == ["objective 2 s"]


def test_a_run_without_anything_is_drawn(tmp_path: Path) -> None:
    written = draw_runs([DrawnRun("nothing", "none", [], [], [])], SLO, 10, tmp_path)
    assert [path.name for path in written] == ["none-latency.png", "none-latency.svg"]
