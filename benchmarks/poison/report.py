"""The page of the study, from its rows: what was fed, what was published, and what of it is broken.

Knows rows only. Invariant: of several rows of one run the last one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.poison.garbage import GARBAGE
from benchmarks.poison.runs import DEGENERATE_FROM, FEEDBACK, LOST_BELOW, NEUTRAL

Row = dict[str, Any]
_HEAD = (
    "| garbage | feedback | runs | feedbacks | versions published | refused | **published and"
    " degenerate** | one broken answer | content lost | cut short |"
)


def page(machine: dict[str, object], rows: Sequence[Row]) -> str:
    """Markdown, a table for each model."""
    lines = [
        "# Bad feedback: what is published of it",
        "",
        ", ".join(f"{name}: {value}" for name, value in machine.items()),
        "",
        f"A version is degenerate where {DEGENERATE_FROM} of its {len(NEUTRAL)} answers to neutral"
        " questions are broken and the base's are not; its content is lost where they share less"
        f" than {LOST_BELOW:g} of their words with the base's. See docs/benchmarks.md.",
    ]
    for model in sorted({row["model"] for row in rows}):
        latest = {(row["seed"], row["run"]): row for row in rows if row["model"] == model}
        lines += ["", f"## {model}", "", *_table(list(latest.values()))]
        lines += ["", *_codes(list(latest.values()))]
        lines += _bad(list(latest.values()))
    return "\n".join(lines) + "\n"


def _codes(rows: Sequence[Row]) -> list[str]:
    """How many runs were made by which code (`benchmarks.live.code`)."""
    counted = Counter(row["code"] for row in rows)
    made = ", ".join(f"{number} by code {code}" for code, number in sorted(counted.items()))
    samples = sum(sum(row["samples"].values()) for row in rows)
    invalid = sum(row["samples"].get("invalid", 0) for row in rows)
    return [f"Runs: {made}. {invalid / max(1, samples):.0%} of their samples were `invalid`."]


def degenerate(rows: Sequence[Row]) -> int:
    """Published versions that are broken."""
    return sum(each["degenerate"] for row in rows for each in row["published"])


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [_HEAD, "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for garbage in GARBAGE:
        for feedback in FEEDBACK:
            ours = [r for r in rows if (r["garbage"], r["feedback"]) == (garbage, feedback)]
            if ours:
                lines.append(_line(garbage, feedback, ours))
    lines.append(_line("all", "", rows))
    for keys in sorted({row["keys"] for row in rows}):
        ours = [row for row in rows if row["keys"] == keys]
        lines.append(_line("all", f"{keys} API key{'s' * (keys > 1)}", ours))
    return lines


def _line(garbage: str, feedback: str, rows: Sequence[Row]) -> str:
    published = [each for row in rows for each in row["published"]]
    cells = (
        garbage,
        feedback,
        len(rows),
        sum(row["count"] for row in rows),
        len(published),
        sum(len(row["refused"]) for row in rows),
        degenerate(rows),
        sum(each["broken"] == 1 for each in published),
        sum(each["lost"] for each in published),
        sum(row["ended"] == "limit" for row in rows),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _bad(rows: Sequence[Row]) -> list[str]:
    """Every version that should not have been published, with an answer of it."""
    found = [
        f"* run {row['run']} of seed {row['seed']}, {row['garbage']} by {row['feedback']},"
        f" version {each['version']}: {', '.join(each['problems']) or 'content lost'}:"
        f" `{_quoted(each['example'])}`"
        for row in rows
        for each in row["published"]
        if each["degenerate"] or each["lost"]
    ]
    return ["", *found] if found else []


def _quoted(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")
