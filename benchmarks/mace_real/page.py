"""The page: averages, paired comparisons and what they say about the paper's claim.

Knows reports only. Invariant: a difference is called one only where its interval leaves out 1.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.learning.report import LearningReport, RunKey, as_markdown
from benchmarks.mace_real.run import Kept
from benchmarks.reporting.bootstrap import Interval

PAPER_GAIN = 1.1


def page(heading: str, found: LearningReport, runs: Mapping[RunKey, Kept], wanted: int) -> str:
    """Markdown."""
    lines = [
        "# MACE's figures 2 and 9 with a real model",
        "",
        heading,
        "",
        f"{len(runs)} of {wanted} runs; each is made once.",
        "",
        *_verdicts(found),
        "",
        as_markdown(found),
        *_gate(runs),
    ]
    return "\n".join(lines) + "\n"


def _verdicts(found: LearningReport) -> list[str]:
    """`unified` against each other policy in words, and its best gain over no retraining."""
    lines, gains = [], dict[float, Interval]()
    for rate, compared in found.comparisons.items():
        for each in compared:
            said = verdict(each.win_rate_ratio)
            lines.append(
                f"* retrain rate {rate:g}: win rate of `unified` over `{each.theirs}`"
                f" {_shown(each.win_rate_ratio)}: {said}"
            )
            if each.theirs == "no_retrain":
                gains[rate] = each.win_rate_ratio
    if gains:
        best = max(gains, key=lambda rate: gains[rate].value)
        everywhere = min(gain.value for gain in gains.values()) >= 1.0
        reached = "reached" if gains[best].value >= PAPER_GAIN else "not reached"
        lines += [
            f"* `unified` wins {'at least as often as' if everywhere else 'less often than'}"
            f" `no_retrain` at {'every retrain rate' if everywhere else 'some retrain rate'}.",
            f"* Best gain over `no_retrain`: {_shown(gains[best])} at {best:g}; the paper's is"
            f" {PAPER_GAIN:g}: {reached}.",
        ]
    return lines


def verdict(ratio: Interval) -> str:
    """Whether two policies can be told apart."""
    if ratio.low > 1.0:
        return "higher"
    return "lower" if ratio.high < 1.0 else "not separable"


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


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
