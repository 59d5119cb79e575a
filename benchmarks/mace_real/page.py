"""The page: averages, paired comparisons and what they say about the paper's claim.

Knows reports only. Invariant: policies are said to differ only where the interval says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.learning.report import (
    Both,
    LearningReport,
    RunKey,
    as_markdown,
    paired,
    within,
)
from benchmarks.mace_real.run import Kept
from benchmarks.reporting.bootstrap import Interval, difference

BASE = "no_retrain"
BAR = 1.1
IN_THE_PAPER = (
    "MACE reports up to 1.19 times for periodic and 1.24 times for continuous retraining (3.1)."
)
PARTS = 3


def page(heading: str, found: LearningReport, runs: Mapping[RunKey, Kept], wanted: int) -> str:
    """Markdown."""
    lines = [
        "# MACE's figures 2 and 9 with a real model",
        "",
        heading,
        "",
        f"{len(runs)} of {wanted} runs, of seeds that all policies have; each is made once.",
        "",
        *_verdicts(found),
        "",
        "Intervals are of pairs drawn anew, with the versions as these runs made them. They do not"
        " say what other runs would have learned.",
        "",
        as_markdown(found),
        *_over_time(runs),
        *_gate(runs),
    ]
    return "\n".join(lines) + "\n"


def _verdicts(found: LearningReport) -> list[str]:
    """`unified` against each other policy in words, and its best gain over no retraining."""
    lines, gains = [], dict[float, Interval]()
    for rate, compared in found.comparisons.items():
        for each in compared:
            ratio, clpd = each.win_rate_ratio, each.clpd_difference
            lines.append(
                f"* retrain rate {rate:g}, `unified` against `{each.theirs}`: win rate"
                f" {_shown(ratio)} times, {verdict(ratio, 1.0)}; CLPD {_shown(clpd)} nats more,"
                f" {verdict(clpd, 0.0)}"
            )
            if each.theirs == BASE:
                gains[rate] = ratio
    if gains:
        best = max(gains, key=lambda rate: gains[rate].value)
        gain = gains[best]
        lines.append(
            f"* Best gain in win rate over `{BASE}` (of {len(gains)} retrain rates, so rather too"
            f" high): {_shown(gain)} at {best:g}. The bar is {BAR:g}: {_reached(gain)}."
            f" {IN_THE_PAPER}"
        )
    return lines


def verdict(interval: Interval, none: float) -> str:
    """Whether two policies can be told apart; `none` is the value of no difference."""
    if interval.low > none:
        return "higher"
    return "lower" if interval.high < none else "not separable"


def _reached(gain: Interval) -> str:
    if gain.low >= BAR:
        return "reached"
    return "missed" if gain.high < BAR else "not separable from it"


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _over_time(runs: Mapping[RunKey, Kept]) -> list[str]:
    """Each policy against no retraining on the same pairs, by parts of the run."""
    lines = [
        f"| retrain rate | policy less `{BASE}` | part of the run | pairs | under a version | win"
        " rate | CLPD, nats |",
        "|---:|---|---|---:|---:|---:|---:|",
    ]
    for rate in sorted({key.retrain_rate for key in runs}):
        for policy in dict.fromkeys(key.policy for key in runs):
            both = [
                (key.seed, kept.record, runs[RunKey(rate, BASE, key.seed)].record)
                for key, kept in runs.items()
                if (key.retrain_rate, key.policy) == (rate, policy) != (rate, BASE)
                and RunKey(rate, BASE, key.seed) in runs
            ]
            for part in range(PARTS):
                lines += _part(rate, policy, both, part)
    return [*lines, ""]


def _part(rate: float, policy: str, both: Both, part: int) -> list[str]:
    low, high = part / PARTS, (part + 1) / PARTS
    cut = [
        (seed, *(replace(record, pairs=within(record, low, high)) for record in records))
        for seed, *records in both
    ]
    pairs = [pair for _, ours, _ in cut for pair in ours.pairs]
    if not pairs:
        return []
    cells = (
        f"{rate:g}",
        policy,
        f"{part + 1} of {PARTS}",
        f"{len(pairs)}",
        f"{sum(pair.version > 0 for pair in pairs)}",
        _shown(difference(paired(cut, lambda pair: float(pair.difference > 0.0)))),
        _shown(difference(paired(cut, lambda pair: pair.difference))),
    )
    return [f"| {' | '.join(cells)} |"]


def _gate(runs: Mapping[RunKey, Kept]) -> list[str]:
    """What the gate did, by rate and policy."""
    lines = [
        "| retrain rate | policy | runs | versions published | refused | samples at the end |",
        "|---:|---|---:|---:|---:|---|",
    ]
    groups: dict[tuple[float, str], list[Kept]] = {}
    for key, kept in runs.items():
        groups.setdefault((key.retrain_rate, key.policy), []).append(kept)
    for (rate, policy), group in sorted(groups.items()):
        states: dict[str, int] = {}
        for kept in group:
            for state, count in kept.samples.items():
                states[state] = states.get(state, 0) + count
        samples = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        published = sum(len(kept.record.lessons.versions) for kept in group)
        refused = sum(len(kept.refused) for kept in group)
        cells = (f"{rate:g}", policy, len(group), published, refused, samples)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
