"""Writes a study's result file, its page and its figures, and says what a pool is.

Invariant: the page is made of what the file has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.echo.pools import SOURCES
from benchmarks.echo.report import Setup, as_page, goals, rows
from benchmarks.echo.runs import Run
from tandem.core.request import Request

SCHEMA = "tandem-echo-1"


def write(setup: Setup, runs: Sequence[Run], out: Path, *, draw: bool) -> str:
    """Write STEM.json and STEM.md, and with `draw` the figures; returns the page."""
    from benchmarks.echo.figures import draw_all

    out.mkdir(parents=True, exist_ok=True)
    content = {
        "schema": SCHEMA,
        **asdict(setup),
        "goals": [list(each) for each in goals(setup, rows(runs))],
        "rows": [asdict(each) for each in rows(runs)],
        "runs": [_short(asdict(each)) for each in runs],
    }
    (out / f"{setup.stem}.json").write_text(json.dumps(content, allow_nan=False) + "\n")
    page = as_page(setup, runs, draw_all(setup, runs, out) if draw else [])
    (out / f"{setup.stem}.md").write_text(page)
    return page


def described(name: str, offline: Sequence[Request]) -> str:
    """A pool in words."""
    prompts = [len(each.prompt) for each in offline]
    answers = [each.sampling.max_tokens for each in offline]
    return (
        f"{SOURCES[name].title}: {len(offline):,} requests with {fmean(prompts):,.0f} prompt "
        f"tokens (at most {max(prompts):,}) and {fmean(answers):.0f} answer tokens on average"
    )


def brief(run: Run) -> str:
    """A run in a line."""
    return (
        f"{run.dataset:13} {run.policy:8} round {run.round + 1}: {run.tokens_s:8.0f} offline"
        f" tokens/s, {run.hit_share:.0%} hits, {run.attainment:.1%} attained"
    )


def _short(run: dict[str, Any]) -> dict[str, Any]:
    """With fewer digits, and samples as rows."""
    for name in ("ttft_s", "tpot_s"):
        run[name] = [round(each, 5) for each in run[name]]
    samples = run["samples"]
    run["samples"] = {
        "columns": list(samples[0]) if samples else [],
        "rows": [[round(each, 2) for each in sample.values()] for sample in samples],
    }
    run["bins"] = [list(each.values()) for each in run["bins"]]
    return run
