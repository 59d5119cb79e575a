"""A finished search as data and as a page: the best candidate, what each dial alone does.

Knows shares and the rule, not how they came about. Invariant: the page says nothing that the data
does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.constants.dials import DIALS, Point, defaults, options_of
from benchmarks.constants.rule import Verdict, allowed, by_workload, judge, score
from benchmarks.constants.workloads import Share

Tried = tuple[Point, list[Share]]


@dataclass(frozen=True, slots=True)
class Found:
    """All that a search tried, in order: the defaults, then `alone` points of one dial each. Shares
    are of the search set's runs, those of `held` and `held_base` of the held-out set's."""

    policy: str
    tried: list[Tried]
    alone: int
    best: Tried
    held: list[Share]
    held_base: list[Share]

    @property
    def base(self) -> list[Share]:
        """The defaults' shares."""
        return self.tried[0][1]

    @property
    def verdict(self) -> Verdict:
        """Whether the best candidate should become the default."""
        return judge(self.held, self.held_base)

    def as_data(self) -> dict[str, object]:
        """Everything that was measured."""
        candidates = [
            {
                "dials": point,
                "options": options_of(self.policy, point),
                "score": score(shares),
                "allowed": allowed(shares, self.base),
                "runs": shares,
            }
            for point, shares in self.tried
        ]
        return {
            "candidates": candidates,
            "best": {"dials": self.best[0], "options": options_of(self.policy, self.best[0])},
            "held_out": {"defaults": self.held_base, "best": self.held},
            "verdict": self.verdict,
            "clear": self.verdict.clear,
        }


def as_markdown(found: Sequence[Found]) -> str:
    """The page of all searches."""
    lines = [
        "# Constants, searched in simulation",
        "",
        "Score: mean over the runs of goodput (the share of requests that met both objectives) and "
        "a quarter of training (the share of jobs, weighed by their loss, that were trained before "
        "the last request came). What trains over a point less than the defaults is not allowed.",
    ]
    for each in found:
        lines += ["", f"## `{each.policy}`", "", *_dials(each), "", *_sets(each), "", _said(each)]
    return "\n".join([*lines, ""])


def _dials(found: Found) -> list[str]:
    """Each dial's range, default and best value, and the scores with it alone turned."""
    base = score(found.base)
    lines = [
        f"{len(found.tried)} candidates. Changes of the score are in points, for the dial alone at "
        "four places of its range; a star marks what is not allowed.",
        "",
        "| dial | range | default | best | alone |",
        "|---|---|---:|---:|---|",
    ]
    start, alone = defaults(found.policy), found.tried[1 : 1 + found.alone]
    for name, dial in DIALS[found.policy].items():
        cells = [
            f"{point[name]:g}: {100 * (score(shares) - base):+.1f}"
            + ("" if allowed(shares, found.base) else "*")
            for point, shares in alone
            if all(point[other] == start[other] for other in start if other != name)
        ]
        lines.append(
            f"| {name} | {dial.low:g} to {dial.high:g} | {dial.default:g} | "
            f"{found.best[0][name]:g} | {', '.join(cells)} |"
        )
    return lines


def _sets(found: Found) -> list[str]:
    """Goodput and training by workload, defaults and best."""
    lines = [
        "| set | workload | goodput, defaults | best | training, defaults | best |",
        "|---|---|---:|---:|---:|---:|",
    ]
    sets = (("search", found.base, found.best[1]), ("held out", found.held_base, found.held))
    for title, base, best in sets:
        theirs, ours = by_workload(base), by_workload(best)
        for name, before in theirs.items():
            after = ours[name]
            lines.append(
                f"| {title} | {name} | {before.goodput:.1%} | {after.goodput:.1%} | "
                f"{before.training:.1%} | {after.training:.1%} |"
            )
    return lines


def _said(found: Found) -> str:
    verdict, gain = found.verdict, found.verdict.gain
    return (
        f"Held out: score {100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to "
        f"{100 * gain.high:+.1f}), training {100 * verdict.training:+.1f}, goodput at worst "
        f"{100 * verdict.worst_goodput:+.1f} ({verdict.worst_workload}). "
        f"{'A clear gain.' if verdict.clear else 'No clear gain: the defaults stay.'}"
    )
