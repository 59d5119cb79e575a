"""The page of the study: bars, then tables by part.

Invariant: the same runs give the same page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from benchmarks.rtlm.bars import Bar, Runs, compared, shown
from benchmarks.rtlm.load import SUBSETS
from benchmarks.rtlm.runs import BATCHING, Run
from benchmarks.rtlm.study import ABLATION, PERFECT, UNIFIED

_POLICIES = (*BATCHING, PERFECT, UNIFIED)


def page(head: str, found: Sequence[Bar], runs: Runs, figures: Sequence[tuple[str, str]]) -> str:
    """The results as Markdown. `figures` are names of files with what they show."""
    parts = ["# RT-LM on real answer lengths", "", head, "", *_bars(found)]
    for busy in runs.loads("tables"):
        for static in (True, False):
            parts += _table(runs, busy, static=static)
    for lines in (_ablation(runs), _parameters(runs), _malicious(runs), _overhead(runs)):
        parts += lines
    for name, said in figures:
        parts += [f"## {said}", "", f"![{said}]({name}.png)", ""]
    return "\n".join(parts)


def _bars(found: Sequence[Bar]) -> Iterator[str]:
    yield from ("## Bars", "", "| claim | found | |", "|---|---|---|")
    for bar in found:
        yield f"| {bar.claim} | {bar.found} | {'met' if bar.met else '**not met**'} |"
    yield from (
        "",
        "A percentage in brackets is the 95% interval of a paired bootstrap over tasks.",
        "",
    )


def _table(runs: Runs, busy: float, *, static: bool) -> Iterator[str]:
    kind = "static" if static else "continuous"
    yield from (
        f"## {kind.capitalize()} batches, load {busy:g} (tables III and IV)",
        "",
        "Mean and maximum response time in seconds, and tasks a minute, by the variance of u. The"
        " difference is that of the mean from FIFO's, task by task.",
        "",
        f"| policy | {' | '.join(f'{name}: mean | max | /min | from FIFO' for name in SUBSETS)} |",
        f"|---|{'---:|' * 4 * len(SUBSETS)}",
    )
    for policy in _POLICIES:
        cells = [policy]
        for tasks in SUBSETS:
            series = runs.of("tables", tasks, policy, static=static, busy=busy)
            if not series:
                break
            fifo = runs.of("tables", tasks, "fifo", static=static, busy=busy)
            difference = "" if policy == "fifo" else shown(compared(series, fifo))
            cells += [*_figures(series), difference]
        if len(cells) > 1:
            yield f"| {' | '.join(cells)} |"
    yield ""


def _ablation(runs: Runs) -> Iterator[str]:
    [busy] = runs.loads("ablation")
    yield from (
        f"## Ablation, large variance, load {busy:g} (figures 10 and 12)",
        "",
        "The overflow engine has the given share of the device, and the main engine the rest. Other"
        " variants have one engine on the whole device.",
        "",
        "| variant | static: mean | max | /min | from FIFO |"
        " continuous: mean | max | /min | from FIFO |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    )
    for label, _, _ in ABLATION:
        cells = [label]
        for static in (True, False):
            series = runs.of("ablation", "large", label, static=static, busy=busy)
            fifo = runs.of("ablation", "large", "FIFO", static=static, busy=busy)
            difference = "" if label == "FIFO" else shown(compared(series, fifo))
            cells += [*_figures(series), difference]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _parameters(runs: Runs) -> Iterator[str]:
    [busy] = runs.loads("parameters")
    yield from (
        f"## Parameters, large variance, static batches, load {busy:g} (figure 13)",
        "",
        "Mean response time in seconds: `alpha` with `gather` at 2, `gather` with `alpha` at 1.",
        "",
    )
    for name in runs.places("parameters"):
        found = parameter_s(runs, name)
        yield f"| {name} | {' | '.join(found)} |"
        yield f"|---|{'---:|' * len(found)}"
        yield f"| mean, s | {' | '.join(f'{value:.2f}' for value in found.values())} |"
        yield ""


def parameter_s(runs: Runs, name: str) -> dict[str, float]:
    """Mean response time by the value of a parameter."""
    series = [r for r in runs.made if r.case.study == "parameters" and r.case.tasks == name]
    values = dict.fromkeys(run.case.policy for run in series)
    return {
        value: fmean(run.mean_s for run in series if run.case.policy == value) for value in values
    }


def _malicious(runs: Runs) -> Iterator[str]:
    [busy] = runs.loads("malicious")
    places = runs.places("malicious")
    yield from (
        f"## Benign tasks by the share of malicious ones, load {busy:g} without attack (figure 14)",
        "",
        "Mean response time of benign tasks in seconds. A malicious task stands in the place of a"
        " benign one, at the same time. The overflow engine has the given share of the device, and"
        " the main engine the rest. Tau is the 0.9-quantile of all forecasts; a recent tau is that"
        " of the last 1,024 requests.",
        "",
        f"| policy, batches | {' | '.join(places)} |",
        f"|---|{'---:|' * len(places)}",
    )
    for (policy, static), found in malicious_s(runs).items():
        kind = "static" if static else "continuous"
        yield f"| {policy}, {kind} | {' | '.join(f'{value:.2f}' for value in found)} |"
    yield ""


def malicious_s(runs: Runs) -> dict[tuple[str, bool], list[float]]:
    """Mean response time of benign tasks by share, by policy and kind of batches."""
    [busy] = runs.loads("malicious")
    places = runs.places("malicious")
    kinds = dict.fromkeys(
        (run.case.policy, run.case.static) for run in runs.made if run.case.study == "malicious"
    )
    return {
        (policy, static): [
            fmean(
                run.mean_s for run in runs.of("malicious", tasks, policy, static=static, busy=busy)
            )
            for tasks in places
        ]
        for policy, static in kinds
    }


def _overhead(runs: Runs) -> Iterator[str]:
    yield from (
        "## What scheduling takes (table VII)",
        "",
        "| policy, batches | ms a task | of the device's time for it |",
        "|---|---:|---:|",
    )
    for run in runs.made:
        if run.case.study == "overhead":
            kind = "static" if run.case.static else "continuous"
            share = run.schedule_s * len(run.response_s) / run.ended_s
            yield f"| {run.case.policy}, {kind} | {1e3 * run.schedule_s:.2f} | {share:.2%} |"
    yield ""


def _figures(series: Sequence[Run]) -> list[str]:
    """Means over seeds."""
    return [
        f"{fmean(run.mean_s for run in series):.1f}",
        f"{fmean(run.most_s for run in series):.1f}",
        f"{fmean(run.per_minute for run in series):.1f}",
    ]
