"""Figures 9, 13 and 14 of RT-LM from the runs of this study.

matplotlib is an extra, imported when a figure is drawn. Invariant: the same runs give the same
pictures, in PNG and SVG.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rtlm.bars import Runs
from benchmarks.rtlm.load import SUBSETS
from benchmarks.rtlm.report import malicious_s, parameter_s
from benchmarks.rtlm.runs import BATCHING
from benchmarks.rtlm.study import UNIFIED
from tandem.bench.figures import new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_all(runs: Runs, folder: Path, stem: str) -> list[tuple[str, str]]:
    """Write them; the name of each (without its suffix) and what it shows. Raises `InvalidRequest`
    if matplotlib is missing."""
    pictures = {
        "response": ("Figure 9: response times by the variance of u", responses(runs)),
        "parameters": ("Figure 13: alpha and gather (b)", parameters(runs)),
        "malicious": ("Figure 14: benign tasks by the share of malicious ones", malicious(runs)),
    }
    for name, (_, picture) in pictures.items():
        save(picture, folder, f"{stem}-{name}")
    return [(f"{stem}-{name}", said) for name, (said, _) in pictures.items()]


def responses(runs: Runs) -> Figure:
    """Quartiles, and 5 to 95%, under the least load; the mean as a point."""
    busy = runs.loads("tables")[0]
    figure = new_figure(11.0, 6.0)
    for place, axes in enumerate(figure.subplots(2, len(SUBSETS), sharey=True).flatten()):
        static, tasks = place < len(SUBSETS), SUBSETS[place % len(SUBSETS)]
        policies = BATCHING if static else (*BATCHING, UNIFIED)
        drawn = [
            [
                seconds
                for run in runs.of("tables", tasks, policy, static=static, busy=busy)
                for seconds in run.response_s.values()
            ]
            for policy in policies
        ]
        axes.boxplot(drawn, whis=(5, 95), showfliers=False, showmeans=True)
        axes.set_xticks(range(1, len(policies) + 1), policies, fontsize=8)
        axes.set_title(f"{tasks} variance, {'static' if static else 'continuous'}", fontsize=9)
        axes.set_ylabel("response time (s)")
        axes.grid(alpha=0.3, axis="y")
    return figure


def parameters(runs: Runs) -> Figure:
    """Mean response time against each."""
    names = runs.places("parameters")
    figure = new_figure(8.0, 3.2)
    for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
        found = parameter_s(runs, name)
        axes.plot([float(value) for value in found], list(found.values()), marker="o")
        axes.set_xlabel(name)
        axes.set_ylabel("mean response (s)")
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
    return figure


def malicious(runs: Runs) -> Figure:
    """Mean response time of benign tasks against the share; a policy has one colour."""
    figure = new_figure(11.0, 4.0)
    shares = [float(name.rstrip("%")) for name in runs.places("malicious")]
    found = malicious_s(runs)
    colours = {name: f"C{n}" for n, name in enumerate(dict.fromkeys(name for name, _ in found))}
    for axes, kind in zip(figure.subplots(1, 2), (True, False), strict=True):
        for (policy, static), seconds in found.items():
            if static == kind:
                axes.plot(shares, seconds, marker=".", color=colours[policy], label=policy)
        axes.set_title(f"{'static' if kind else 'continuous'} batches", fontsize=9)
        axes.set_xlabel("malicious tasks (%)")
        axes.set_ylabel("mean response of benign tasks (s)")
        axes.set_ylim(bottom=0.0)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    return figure
