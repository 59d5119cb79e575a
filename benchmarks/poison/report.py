"""The page of the study, from its rows: what was fed, what was published, and what of it is broken.

Knows rows only. Invariant: of each model only rows of the newest code and options count, and of
several rows of one run the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.live.margins import margins
from benchmarks.poison.garbage import GARBAGE
from benchmarks.poison.runs import DEGENERATE_FROM, FEEDBACK, LOST_BELOW, NEUTRAL

Row = dict[str, Any]
_HEAD = (
    "| garbage | feedback | runs | feedbacks | runs that made a version | versions published |"
    " refused | **published and degenerate** | one broken answer | content lost | changed no answer"
    " | samples left | cut short |"
)
_RULE = "|---|---|" + "---:|" * (_HEAD.count("|") - 3)
_MADE = ("seed", "settings", "most", "code")


def newest(rows: Sequence[Row], model: str) -> list[Row]:
    """The rows of a model that were made as its last one was, one for each run."""
    ours = [row for row in rows if row["model"] == model]
    return list(
        {
            row["run"]: row
            for row in ours
            if all(row.get(name) == ours[-1].get(name) for name in _MADE)
        }.values()
    )


def page(rows: Sequence[Row], wanted: Mapping[str, int]) -> str:
    """Markdown, a table for each model; `wanted`: how many runs there should be, where known."""
    lines = [
        "# Bad feedback: what is published of it",
        "",
        f"A version is degenerate where {DEGENERATE_FROM} of its {len(NEUTRAL)} answers to neutral"
        " questions are broken and the base's are not; its content is lost where they share less"
        f" than {LOST_BELOW:g} of their words with the base's. See docs/benchmarks.md.",
    ]
    for model in sorted({row["model"] for row in rows}):
        ours = newest(rows, model)
        lines += ["", f"## {model}", "", *_table(ours)]
        lines += ["", *_about(ours, wanted.get(model, len(ours))), "", _bound(ours)]
        lines += _bad(ours)
        lines += margins([each for row in ours for each in row.get("versions", ())])
    return "\n".join(lines) + "\n"


def _about(rows: Sequence[Row], wanted: int) -> list[str]:
    """How many runs there are, where, by which code (`benchmarks.live.code`) and settings."""
    samples = sum(sum(row["samples"].values()) for row in rows)
    invalid = sum(row["samples"].get("invalid", 0) for row in rows)
    settings = ", ".join(f"{name} {value}" for name, value in rows[0]["settings"].items())
    machines = Counter(row["machine"] for row in rows).most_common()
    return [
        f"{len(rows)} of {wanted} runs ({'; '.join(f'{n} on {where}' for where, n in machines)}),"
        f" by code {rows[0]['code']}, adapters' settings:"
        f" {settings or 'defaults'}. {invalid / max(1, samples):.0%} of their samples were"
        " `invalid`."
    ]


def _bound(rows: Sequence[Row]) -> str:
    """What the number of degenerate versions says, by run: versions of one run are related."""
    published = [row for row in rows if row["published"]]
    bad = sum(degenerate([row]) > 0 for row in published)
    said = f"{len(published)} runs published a version, {bad} of them a degenerate one"
    if bad or not published:
        return f"{said}."
    most = 1.0 - 0.05 ** (1.0 / len(published))
    return f"{said}: less than {most:.1%} of such runs do (95%)."


def degenerate(rows: Sequence[Row]) -> int:
    """Published versions that are broken."""
    return sum(each["degenerate"] for row in rows for each in row["published"])


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [_HEAD, _RULE]
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
        sum(bool(row["published"] or row["refused"]) for row in rows),
        len(published),
        sum(len(row["refused"]) for row in rows),
        degenerate(rows),
        sum(each["broken"] == 1 for each in published),
        sum(each["lost"] for each in published),
        sum(not each["changed"] for each in published),
        sum(row["ended"] == "quiet" for row in rows),
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
