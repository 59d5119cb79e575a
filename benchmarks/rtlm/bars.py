"""What the study is to show, and whether it does.

Response times are compared task by task: an interval is that of a paired bootstrap over tasks, all
seeds of a task together. Invariant: a bar is judged by the runs alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.reporting.bootstrap import Interval, ratio
from benchmarks.rtlm.load import SUBSETS
from benchmarks.rtlm.runs import Run
from benchmarks.rtlm.study import OVERFLOW, PERFECT, UNIFIED

MOST_RATIO = 0.7  # of the maximum response time, RT-LM's over FIFO's, in the best case
RATE_RATIO = 1.4  # of the tasks a minute likewise
ATTACKED = 1.2  # of benign response times under attack
UP_TO = 0.5  # share of malicious tasks
OVERHEAD = 0.03  # of the device's time
OURS = (("rt_lm", True), ("rt_lm", False), (UNIFIED, False))
"""Policies that are to protect benign tasks, and whether their batches are static."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One claim, what was found, and whether it holds."""

    claim: str
    found: str
    met: bool


@dataclass(frozen=True)
class Runs:
    """All runs of the study; series of seeds by their case."""

    made: Sequence[Run]

    def of(self, study: str, tasks: str, policy: str, *, static: bool, busy: float) -> list[Run]:
        """One run a seed."""
        wanted = (study, tasks, policy, static, busy)
        return [
            run
            for run in self.made
            if (
                (case := run.case).study, case.tasks, case.policy, case.static, case.busy
            ) == wanted
        ]  # fmt: skip

    def loads(self, study: str) -> list[float]:
        """Values of `busy`, rising."""
        return sorted({run.case.busy for run in self.made if run.case.study == study})

    def places(self, study: str) -> list[str]:
        """Names of tasks, in the order of the runs."""
        return list(dict.fromkeys(run.case.tasks for run in self.made if run.case.study == study))


def compared(ours: Iterable[Run], theirs: Iterable[Run]) -> Interval:
    """Ratio of mean response times over the tasks that both have."""
    clusters = defaultdict[str, list[tuple[float, float]]](list)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.case.seed == other.case.seed
        for name in mine.response_s.keys() & other.response_s.keys():
            pair = (mine.response_s[name], other.response_s[name])
            clusters[f"{mine.case.seed}/{name}"].append(pair)
    return ratio(dict(sorted(clusters.items())))


def bars(runs: Runs, lexical_s: float) -> Iterator[Bar]:
    """All of them. `lexical_s` are the seconds of a task's scores and forecast."""
    yield from _against_fifo(runs)
    yield from _unified(runs)
    yield from _malicious(runs)
    yield from _overhead(runs, lexical_s)


def _against_fifo(runs: Runs) -> Iterator[Bar]:
    for static in (True, False):
        for policy in ("rt_lm", PERFECT):
            yield from _best_cases(runs, policy, static=static)


def _best_cases(runs: Runs, policy: str, *, static: bool) -> Iterator[Bar]:
    kind, found = "static" if static else "continuous", []
    for tasks in SUBSETS:
        for busy in runs.loads("tables"):
            ours, theirs = (
                runs.of("tables", tasks, each, static=static, busy=busy)
                for each in (policy, "fifo")
            )
            most = fmean(run.most_s for run in ours) / fmean(run.most_s for run in theirs)
            rate = fmean(run.per_minute for run in ours) / fmean(run.per_minute for run in theirs)
            found.append((most, rate, f"{tasks} variance, load {busy:g}"))
    most, _, where = min(found)
    yield Bar(
        f"{kind} batches, best case: maximum response time of {policy} at least 30% below fifo's",
        f"{most - 1:+.0%} ({where})",
        most <= MOST_RATIO,
    )
    rate, where = max((rate, where) for _, rate, where in found)
    yield Bar(
        f"{kind} batches, best case: {policy} serves at least 40% more tasks a minute than fifo",
        f"{rate - 1:+.0%} ({where})",
        rate >= RATE_RATIO,
    )


def _unified(runs: Runs) -> Iterator[Bar]:
    for static in (True, False):
        kind = "static" if static else "continuous"
        worst, said = True, []
        for tasks in SUBSETS:
            for busy in runs.loads("tables"):
                ours = runs.of("tables", tasks, UNIFIED, static=False, busy=busy)
                theirs = runs.of("tables", tasks, "rt_lm", static=static, busy=busy)
                found = compared(ours, theirs)
                worst &= found.low <= 1.0
                said.append(f"{tasks} {busy:g}: {shown(found)}")
        yield Bar(
            f"unified's mean response time no longer than rt_lm's with {kind} batches",
            "; ".join(said),
            worst,
        )


def _malicious(runs: Runs) -> Iterator[Bar]:
    [busy] = runs.loads("malicious")
    for policy, static, bounded in (
        *(
            (policy + engines, static, True)
            for engines in ("", *OVERFLOW)
            for policy, static in OURS
        ),
        ("fifo", True, False),
        ("fifo", False, False),
    ):
        calm = runs.of("malicious", "0%", policy, static=static, busy=busy)
        found = [
            (compared(runs.of("malicious", tasks, policy, static=static, busy=busy), calm), tasks)
            for tasks in runs.places("malicious")
            if 0.0 < float(tasks.rstrip("%")) / 100 <= UP_TO
        ]
        rise, where = max(found, key=lambda each: each[0].value)
        kind = "static" if static else "continuous"
        claim = f"{policy}, {kind} batches: benign tasks under up to {UP_TO:.0%} malicious ones "
        claim += "wait at most 20% longer" if bounded else "wait over 20% longer"
        held = rise.value <= ATTACKED if bounded else rise.value > ATTACKED
        yield Bar(claim, f"{shown(rise)} at {where}", held)
    for policy, static in OURS:
        for engines in OVERFLOW:
            yield _apart(runs, policy, engines, static=static)


def _apart(runs: Runs, policy: str, engines: str, *, static: bool) -> Bar:
    """Two engines against one on the same device, under attack."""
    [busy] = runs.loads("malicious")
    two, one = (
        runs.of("malicious", f"{UP_TO:.0%}", each, static=static, busy=busy)
        for each in (policy + engines, policy)
    )
    found = compared(two, one)
    return Bar(
        f"{policy}{engines}, {'static' if static else 'continuous'} batches: benign tasks under"
        f" {UP_TO:.0%} malicious ones wait no longer than with one engine on the whole device",
        shown(found),
        found.value <= 1.0,
    )


def _overhead(runs: Runs, lexical_s: float) -> Iterator[Bar]:
    [busy] = runs.loads("overhead")
    for policy, static in OURS:
        [run] = runs.of("overhead", "normal", policy, static=static, busy=busy)
        device_s = run.ended_s / len(run.response_s)
        share = (run.schedule_s + lexical_s) / device_s
        kind = "static" if static else "continuous"
        yield Bar(
            f"{policy}, {kind} batches: scheduling and forecast take under 3% of a task's time",
            f"{1e3 * run.schedule_s:.2f} + {1e3 * lexical_s:.2f} ms of {device_s:.2f} s:"
            f" {share:.2%}",
            share < OVERHEAD,
        )


def shown(found: Interval) -> str:
    """A ratio as a difference, with its interval."""
    return f"{found.value - 1:+.0%} [{found.low - 1:+.0%}, {found.high - 1:+.0%}]"
