"""The page of the study, from its rows: a table by taste and kind, times, and what trickled in.

Knows rows only. Invariant: only rows of the newest code, model and number of examples count, and of
several rows of one taste and kind the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.live.margins import margins
from benchmarks.tastes.session import KINDS
from benchmarks.tastes.tastes import TASTES

Row = dict[str, Any]
SHOWN_GOAL = {"preferences": 0.8, "demonstrations": 0.8, "thumbs": 0.5}
DEGENERATE_GOAL = 0.05
COLUMNS = (
    "taste | kind | shows it | degenerate (base) | content kept | overlap (by chance) |"
    " base unchanged | other unchanged | first changed answer, s after the first / last feedback |"
    " learned, s | versions published / refused | samples"
)


def latest(rows: Sequence[Row]) -> list[Row]:
    """Of rows made as the last one was, the last of each taste and kind, in the study's order."""
    names = ("model", "lessons", "code")
    found = {
        (row["taste"], row["kind"]): row
        for row in rows
        if all(row[name] == rows[-1][name] for name in names)
    }
    order = [(taste.name, kind) for taste in TASTES for kind in KINDS]
    return [found[key] for key in order if key in found]


def page(machine: dict[str, object], rows: Sequence[Row], trickled: Sequence[Row]) -> str:
    """Markdown."""
    rows = latest(rows)
    models = sorted({row["model"] for row in [*rows, *trickled]})
    lines = [
        "# What a chat model does with 40 examples of a taste",
        "",
        ", ".join(f"{name}: {value}" for name, value in machine.items()),
        "",
        f"Model: {', '.join(models)}. Through HTTP, default settings; see docs/benchmarks.md."
        f" Code: {_code([*rows, *trickled])}. {len(rows)} of {len(TASTES) * len(KINDS)} runs.",
        "",
    ]
    if rows:
        lines += [f"| {COLUMNS} |", "|---" * len(COLUMNS.split("|")) + "|"]
        lines += [_line(row) for row in rows]
        lines += ["", *_summary(rows)]
        lines += margins([each for row in rows for each in row["versions"]])
        lines += ["", "## What was taught, and what came of it", ""]
        lines += [line for row in rows for line in _example(row)]
    for row in trickled:
        lines += ["", *_trickle(row)]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    """One row of the table."""
    published = sum(each["state"] not in ("candidate", "refused") for each in row["versions"])
    refused = sum(each["state"] == "refused" for each in row["versions"])
    changed = row["changed_s"]
    cells = (
        row["taste"],
        row["kind"],
        f"{row['shown']:.0%}",
        f"{row['degenerate']:.0%} ({row['base_degenerate']:.0%})",
        _share(row["kept"]),
        "-" if row["overlap"] is None else f"{row['overlap']:.2f} ({row['overlap_by_chance']:.2f})",
        row["unchanged"]["base"],
        row["unchanged"]["other"],
        f"{_seconds(changed['from_first'])} / {_seconds(changed['from_last'])}",
        f"{row['learned_s']:.0f}" + ("" if row["ended"] == "learned" else f" ({row['ended']})"),
        f"{published} / {refused}",
        ", ".join(f"{count} {state}" for state, count in sorted(row["samples"].items())),
    )
    return f"| {' | '.join(cells)} |"


def _summary(rows: Sequence[Row]) -> list[str]:
    """By kind: how many tastes reach the goals, and median and worst time to a changed answer."""
    lines = [
        "| kind | tastes | show it often enough | degenerate at most 5% | shows it, mean |"
        " first changed answer after the first feedback, s: median, worst |"
        " after the last: median, worst |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        ours = [row for row in rows if row["kind"] == kind]
        if not ours:
            continue
        goal = SHOWN_GOAL[kind]
        cells = (
            kind,
            str(len(ours)),
            f"{sum(row['shown'] >= goal for row in ours)} (at least {goal:.0%})",
            str(sum(row["degenerate"] <= DEGENERATE_GOAL for row in ours)),
            f"{sum(row['shown'] for row in ours) / len(ours):.0%}",
            _times([row["changed_s"]["from_first"] for row in ours]),
            _times([row["changed_s"]["from_last"] for row in ours]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _times(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "never"
    never = len(values) - len(known)
    said = f"{median(known):.0f}, {max(known):.0f}"
    return said + (f" ({never} never)" if never else "")


def _example(row: Row) -> list[str]:
    """The first held answer, and what was refused why."""
    question, answer = row["answers"][0]
    shown = " ".join(answer.split())
    lines = [f"* {row['taste']}, {row['kind']}: {question} -> {shown}"]
    return [*lines, *(f"    {line}" for line in _refusals(row))]


def _refusals(row: Row) -> list[str]:
    """A list of the versions that were refused."""
    return [
        f"* version {each['version']} refused: {' '.join(each['reason'].split())}"
        for each in row["versions"]
        if each["state"] == "refused"
    ]


def _trickle(row: Row) -> list[str]:
    """Every version that was probed while it answered, and why the others did not."""
    worst = max((each["degenerate"] for each in row["probes"]), default=0.0)
    states = Counter(each["state"] for each in row["versions"])
    lines = [
        f"## {row['lessons']} {row['kind']} of `{row['taste']}`, one every {row['every_s']:g} s",
        "",
        f"At the end {row['shown']:.0%} of the held answers show it, {row['degenerate']:.0%} are"
        f" degenerate; samples: {row['samples']}; versions: {dict(states)}; the worst one that"
        f" answered had {worst:.0%} degenerate answers of those probed.",
        "",
        "| version | from, s | shows it | degenerate | changed |",
        "|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each['version']} | {each['at_s']:.0f} | {each['shown']:.0%} |"
        f" {each['degenerate']:.0%} | {each['changed']} |"
        for each in row["probes"]
    ]
    refused = _refusals(row)
    return [*lines, "", *refused] if refused else lines


def _code(rows: Sequence[Row]) -> str:
    """Names of the code that the rows are of (`benchmarks/live/code.py`), with their numbers."""
    found = Counter(row["code"] for row in rows)
    return ", ".join(f"{name} ({count} rows)" for name, count in found.items())


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f}"
