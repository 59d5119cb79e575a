"""The page of the study: a table for each data set, what became of the goals, and the figures.

Knows figures of runs only, as they are in the result file. Invariant: what was not measured is
said, and each number stands beside its unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from benchmarks.echo.policies import BASELINE, ECHO, OURS
from benchmarks.echo.pools import SOURCES
from benchmarks.echo.runs import Run

# The data set of the goals, and of the figures over time.
GOAL_DATASET = "loogle-short"


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs have in common, in words and numbers. `objectives`: seconds to the first token,
    seconds a token; `gain`: of Echo over BS that is the goal."""

    stem: str
    title: str
    where: str
    machine: dict[str, object]
    rate: float
    tried: dict[str, float]
    objectives: tuple[float, float]
    wanted: float
    blocks: int
    block_size: int
    seconds: float
    rounds: int
    gain: float
    settings: dict[str, Any]
    pools: dict[str, str] = field(default_factory=dict)  # in words, by data set


@dataclass(frozen=True, slots=True)
class Row:
    """One policy with one data set, the mean of its rounds; speeds relative to the first policy."""

    dataset: str
    policy: str
    tokens_s: float
    requests_s: float
    speedup: float
    hit_share: float
    attainment: float
    ttft_met: float
    tpot_met: float
    finished: float
    emptied: bool
    seconds: float
    preemptions: float


def rows(runs: Sequence[Run]) -> list[Row]:
    """A row for each data set and policy, in order of the runs."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.dataset, run.policy), []).append(run)
    bases: dict[str, float] = {}
    found = []
    for (dataset, policy), group in groups.items():
        tokens_s = fmean(each.tokens_s for each in group)
        base = bases.setdefault(dataset, tokens_s)
        found.append(
            Row(
                dataset,
                policy,
                tokens_s,
                fmean(each.requests_s for each in group),
                tokens_s / base if base else 0.0,
                fmean(each.hit_share for each in group),
                fmean(each.attainment for each in group),
                fmean(each.ttft_met for each in group),
                fmean(each.tpot_met for each in group),
                fmean(each.offline_requests for each in group),
                all(each.emptied for each in group),
                fmean(each.seconds for each in group),
                fmean(each.preemptions for each in group),
            )
        )
    return found


def goals(setup: Setup, found: Sequence[Row]) -> list[tuple[str, str, bool]]:
    """Each goal that can be judged: what it is, what was found, whether it is met."""
    own = {row.policy: row for row in found if row.dataset == GOAL_DATASET}
    judged = []
    if BASELINE in own and ECHO in own and own[BASELINE].tokens_s:
        gain = own[ECHO].tokens_s / own[BASELINE].tokens_s
        goal = f"Echo at least {setup.gain:g} times BS on LooGLE short QA, offline tokens/s"
        judged.append((goal, f"{gain:.2f} times", gain >= setup.gain))
    if ECHO in own and OURS in own and own[ECHO].tokens_s:
        share = own[OURS].tokens_s / own[ECHO].tokens_s
        goal = "`unified` at least as fast as Echo there"
        judged.append((goal, f"{share:.2f} times", share >= 1.0))
    for name in (ECHO, OURS):
        if name in own:
            goal = f"{name}: {setup.wanted:.0%} of the online requests inside both objectives"
            met = own[name].attainment >= setup.wanted
            judged.append((goal, f"{own[name].attainment:.1%}", met))
    return judged


def as_page(setup: Setup, runs: Sequence[Run], pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The whole page. `pictures`: the name of each without its suffix, and what it shows."""
    found = rows(runs)
    lines = [f"# {setup.title}", "", *_described(setup), ""]
    judged = goals(setup, found)
    if judged:
        lines += ["| goal | found | met |", "|---|---|---|"]
        lines += [f"| {goal} | {what} | {'yes' if met else 'no'} |" for goal, what, met in judged]
        lines.append("")
    for dataset in dict.fromkeys(row.dataset for row in found):
        lines += _table(dataset, [row for row in found if row.dataset == dataset])
    lines += _demand(runs) + _others(runs)
    lines += [
        "Offline tokens/s are prompt and answer tokens of the offline requests that finished, over "
        "the seconds until the pool was empty or the run ended. A prompt token counts whether it "
        "was computed or found in the cache. *Hits* is the share of offline prompt tokens found in "
        "the cache when a request first ran. Attainment is over online requests that ended or "
        "whose first token was due before the run ended. An answer's TPOT is its mean, also of one "
        "that had not ended.",
        "",
    ]
    for name, said in pictures:
        lines += [f"**{said}**", "", f"![{said}]({name}.png)", ""]
    return "\n".join(lines)


def _described(setup: Setup) -> list[str]:
    ttft_s, tpot_s = setup.objectives
    tried = ", ".join(f"{rate}: {share:.0%}" for rate, share in setup.tried.items())
    kv = setup.blocks * setup.block_size
    lines = [
        f"{setup.where} KV memory holds {kv:,} tokens ({setup.blocks:,} blocks). Online requests "
        f"come at the times of Azure's conversation trace of 2023 at {setup.rate:.2f} requests/s "
        f"on average, with lengths as ShareGPT's. Objectives: {ttft_s:g} s to the first token, "
        f"{1e3 * tpot_s:.0f} ms a token. Each run has {setup.seconds:g} s; rounds: {setup.rounds}.",
    ]
    if tried:
        lines += ["", f"Rates tried, with the attainment of online requests alone: {tried}."]
    lines += ["", "Offline requests are all there at the beginning, in a shuffled order:", ""]
    return lines + [f"* {said}" for said in setup.pools.values()]


def _table(dataset: str, found: Sequence[Row]) -> list[str]:
    lines = [
        f"## {SOURCES[dataset].title if dataset in SOURCES else dataset}",
        "",
        "| policy | offline tokens/s | times the first | requests/s | finished | hits | "
        "online attainment | TTFT met | TPOT met | preemptions |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        end = f" in {row.seconds:.0f} s: all" if row.emptied else ""
        lines.append(
            f"| {row.policy} | {row.tokens_s:,.0f} | {row.speedup:.2f} | {row.requests_s:.3f} | "
            f"{row.finished:.0f}{end} | {row.hit_share:.1%} | {row.attainment:.1%} | "
            f"{row.ttft_met:.1%} | {row.tpot_met:.1%} | {row.preemptions:.0f} |"
        )
    return [*lines, ""]


def _others(runs: Sequence[Run]) -> list[str]:
    """How much of the machine was somebody else's, where that matters."""
    taken = [run.others for run in runs if run.others]
    if not taken:
        return []
    return [
        f"Other processes took {fmean(taken):.1%} of this machine's cores, in the worst run "
        f"{max(taken):.1%}. With more than a few percent the figures are not to be used.",
        "",
    ]


def _demand(runs: Sequence[Run]) -> list[str]:
    """How often online requests stayed below mu + 2 sigma."""
    samples = [each for run in runs for each in run.samples[1:]]
    if not samples:
        return []
    below = fmean(each.demand <= each.predicted for each in samples)
    return [
        f"Online requests held no more KV blocks than mu + 2 sigma predicted in {below:.1%} of the "
        "samples of all runs (the paper expects 95%).",
        "",
    ]
