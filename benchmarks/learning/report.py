"""From the records of learning runs to averages, curves over time, and paired comparisons.

Knows records, not how they came about. A run is named by (policy, retrain rate, seed). Invariant:
only runs of the same rate and seed, which met the same pairs and requests, are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.learning.runs import PairScore, RunRecord
from benchmarks.reporting.bootstrap import Interval, difference, ratio
from tandem.bench.measure import Outcome, distribution

SCHEMA = "tandem-learning-1"
CURVE_POINTS = 40
CURVE_WINDOW = 0.15


@dataclass(frozen=True, slots=True, order=True)
class RunKey:
    """Names a run."""

    retrain_rate: float
    policy: str
    seed: int


@dataclass(frozen=True, slots=True)
class Averages:
    """One policy at one rate, over its seeds' pairs and requests together. Seconds and nats."""

    pairs: int
    win_rate: float
    clpd: float
    requests: int
    failed: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    versions: int
    updates: int
    uses: int
    freshness_p50_s: float | None


@dataclass(frozen=True, slots=True)
class SourceAverages:
    """One policy on the pairs of one set. CLPD in nats."""

    pairs: int
    win_rate: float
    clpd: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Means over the seeds and over a moving window of each run, at shares of its length."""

    at_s: tuple[float, ...]
    win_rate: tuple[float, ...]
    clpd: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours against theirs on the same pairs and requests; no latencies where one served none."""

    ours: str
    theirs: str
    win_rate_ratio: Interval
    win_rate_difference: Interval
    clpd_difference: Interval
    ttft_ratio: Interval | None
    tpot_ratio: Interval | None


@dataclass(frozen=True, slots=True)
class LearningReport:
    """All rates and policies; comparisons are `unified` with each other policy. `sources`: by rate,
    policy and set of pairs."""

    averages: dict[float, dict[str, Averages]]
    curves: dict[float, dict[str, Curve]]
    comparisons: dict[float, list[Comparison]]
    sources: dict[float, dict[str, dict[str, SourceAverages]]]


def report(records: Mapping[RunKey, RunRecord]) -> LearningReport:
    """Everything from the records of one set of runs."""
    rates = sorted({key.retrain_rate for key in records})
    averages: dict[float, dict[str, Averages]] = {}
    curves: dict[float, dict[str, Curve]] = {}
    comparisons: dict[float, list[Comparison]] = {}
    sources: dict[float, dict[str, dict[str, SourceAverages]]] = {}
    for rate in rates:
        runs = _by_policy(records, rate)
        averages[rate] = {policy: _averages(list(seeds.values())) for policy, seeds in runs.items()}
        sources[rate] = {policy: _by_source(list(seeds.values())) for policy, seeds in runs.items()}
        curves[rate] = {policy: _curve(list(seeds.values())) for policy, seeds in runs.items()}
        comparisons[rate] = [
            compare(runs["unified"], seeds, policy)
            for policy, seeds in runs.items()
            if policy != "unified" and runs.get("unified", {}).keys() & seeds
        ]
    return LearningReport(averages, curves, comparisons, sources)


def as_json(options: Mapping[str, Any], found: LearningReport) -> bytes:
    """One JSON object: `schema`, `options` and the report's fields."""
    data = {"schema": SCHEMA, "options": dict(options), **msgspec.to_builtins(found, str_keys=True)}
    return msgspec.json.format(msgspec.json.encode(data, enc_hook=str), indent=1) + b"\n"


def as_markdown(found: LearningReport) -> str:
    """The table of averages by retrain rate (MACE's figure 9), then the comparisons, then win rate
    and CLPD by source."""
    lines = [
        "| retrain rate | policy | pairs | win rate | CLPD, nats | failed requests |"
        " TTFT p50 / p99, ms | TPOT p50 / p99, ms | updates | versions | pairs used |"
        " freshness p50, s |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for rate, policies in found.averages.items():
        lines += [_row(rate, policy, each) for policy, each in policies.items()]
    lines += [
        "",
        "| retrain rate | unified against | win rate, ratio | win rate, difference |"
        " CLPD, difference | mean TTFT, ratio | mean TPOT, ratio |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for rate, compared in found.comparisons.items():
        for each in compared:
            cells = (
                _interval(each.win_rate_ratio),
                _interval(each.win_rate_difference, "+.3f"),
                _interval(each.clpd_difference, "+.2f"),
                _interval(each.ttft_ratio),
                _interval(each.tpot_ratio),
            )
            lines.append(f"| {rate:g} | {each.theirs} | {' | '.join(cells)} |")
    for rate, by_policy in found.sources.items():
        lines += ["", *_source_table(rate, by_policy)]
    return "\n".join(lines) + "\n"


def _source_table(rate: float, policies: Mapping[str, Mapping[str, SourceAverages]]) -> list[str]:
    """A row for each set of pairs, a column for each policy."""
    lines = [
        f"| win rate / CLPD by source, retrain rate {rate:g} | pairs | {' | '.join(policies)} |",
        f"|---|{'---:|' * (1 + len(policies))}",
    ]
    first = next(iter(policies.values()))
    for source, counted in first.items():
        cells = [
            f"{each[source].win_rate:.3f} / {each[source].clpd:.1f}" if source in each else "-"
            for each in policies.values()
        ]
        lines.append(f"| {source} | {counted.pairs} | {' | '.join(cells)} |")
    return lines


def _row(rate: float, policy: str, each: Averages) -> str:
    fresh = "-" if each.freshness_p50_s is None else f"{each.freshness_p50_s:.1f}"
    cells = (
        f"{rate:g}",
        policy,
        f"{each.pairs}",
        f"{each.win_rate:.3f}",
        f"{each.clpd:.2f}",
        f"{each.failed} of {each.requests}" if each.requests else "-",
        f"{1e3 * each.ttft_p50_s:.0f} / {1e3 * each.ttft_p99_s:.0f}" if each.requests else "-",
        f"{1e3 * each.tpot_p50_s:.1f} / {1e3 * each.tpot_p99_s:.1f}" if each.requests else "-",
        f"{each.updates}",
        f"{each.versions}",
        f"{each.uses}",
        fresh,
    )
    return f"| {' | '.join(cells)} |"


def _interval(interval: Interval | None, form: str = ".3f") -> str:
    if interval is None:
        return "-"
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def _by_policy(records: Mapping[RunKey, RunRecord], rate: float) -> dict[str, dict[int, RunRecord]]:
    runs: dict[str, dict[int, RunRecord]] = {}
    for key, record in records.items():
        if key.retrain_rate == rate:
            runs.setdefault(key.policy, {})[key.seed] = record
    return runs


def _averages(records: Sequence[RunRecord]) -> Averages:
    pairs = [pair for record in records for pair in record.pairs]
    outcomes = [outcome for record in records for outcome in record.outcomes]
    complete = [outcome for outcome in outcomes if outcome.error is None]
    ttft = distribution([o.ttft_s for o in complete if o.ttft_s is not None])
    tpot = distribution([o.tpot_s for o in complete if o.tpot_s is not None])
    fresh = distribution([age for record in records for age in record.lessons.freshness_s])
    nan = float("nan")
    return Averages(
        pairs=len(pairs),
        win_rate=_win_rate(pairs),
        clpd=_clpd(pairs),
        requests=len(outcomes),
        failed=len(outcomes) - len(complete),
        ttft_p50_s=nan if ttft is None else ttft.p50,
        ttft_p99_s=nan if ttft is None else ttft.p99,
        tpot_p50_s=nan if tpot is None else tpot.p50,
        tpot_p99_s=nan if tpot is None else tpot.p99,
        versions=sum(len(record.lessons.versions) for record in records),
        updates=sum(len(record.lessons.losses) for record in records),
        uses=sum(record.lessons.uses for record in records),
        freshness_p50_s=None if fresh is None else fresh.p50,
    )


def _by_source(records: Sequence[RunRecord]) -> dict[str, SourceAverages]:
    sets: dict[str, list[PairScore]] = {}
    for record in records:
        for pair in record.pairs:
            sets.setdefault(pair.source, []).append(pair)
    return {
        source: SourceAverages(len(pairs), _win_rate(pairs), _clpd(pairs))
        for source, pairs in sorted(sets.items())
    }


def _win_rate(pairs: Sequence[PairScore]) -> float:
    return sum(pair.difference > 0.0 for pair in pairs) / len(pairs)


def _clpd(pairs: Sequence[PairScore]) -> float:
    return sum(pair.difference for pair in pairs) / len(pairs)


def _curve(records: Sequence[RunRecord]) -> Curve:
    """A window is a share of a run's time, centred where it can be."""
    at_s, wins, clpds = [], [], []
    half = CURVE_WINDOW / 2
    for point in range(CURVE_POINTS):
        share = (point + 0.5) / CURVE_POINTS
        low = min(max(0.0, share - half), 1.0 - CURVE_WINDOW)
        windows = [within(record, low, low + CURVE_WINDOW) for record in records]
        windows = [window for window in windows if window]
        if windows:
            at_s.append(share * sum(record.seconds for record in records) / len(records))
            wins.append(sum(map(_win_rate, windows)) / len(windows))
            clpds.append(sum(map(_clpd, windows)) / len(windows))
    return Curve(tuple(at_s), tuple(wins), tuple(clpds))


def within(record: RunRecord, low: float, high: float) -> list[PairScore]:
    """The pairs that came between these shares of a run's time."""
    return [pair for pair in record.pairs if low <= pair.at_s / record.seconds <= high]


def compare(
    ours: Mapping[int, RunRecord], theirs: Mapping[int, RunRecord], name: str
) -> Comparison:
    """Over the seeds that both have, paired by pair and by request."""
    seeds = sorted(set(ours) & set(theirs))
    both = [(seed, ours[seed], theirs[seed]) for seed in seeds]
    wins = paired(both, lambda pair: float(pair.difference > 0.0))
    clpd = paired(both, lambda pair: pair.difference)
    ttft = _requests(both, lambda outcome: outcome.ttft_s)
    tpot = _requests(both, lambda outcome: outcome.tpot_s)
    return Comparison(
        "unified",
        name,
        ratio(wins),
        difference(wins),
        difference(clpd),
        ratio(ttft) if ttft else None,
        ratio(tpot) if tpot else None,
    )


Both = Sequence[tuple[int, RunRecord, RunRecord]]


def paired(both: Both, value: Callable[[PairScore], float]) -> dict[str, list[tuple[float, float]]]:
    """By pair: one that several seeds met is one cluster."""
    clusters: dict[str, list[tuple[float, float]]] = {}
    for _, ours, theirs in both:
        for mine, other in zip(ours.pairs, theirs.pairs, strict=True):
            assert mine.key == other.key
            clusters.setdefault(mine.key, []).append((value(mine), value(other)))
    return clusters


def _requests(
    both: Both, value: Callable[[Outcome], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """By request, where both answered it; none of a run that served nobody."""
    clusters: dict[str, list[tuple[float, float]]] = {}
    served = [each for each in both if each[1].outcomes and each[2].outcomes]
    for seed, ours, theirs in served:
        for mine, other in zip(ours.outcomes, theirs.outcomes, strict=True):
            if mine.error is not None or other.error is not None:
                continue
            values = (value(mine), value(other))
            if values[0] is not None and values[1] is not None:
                clusters[f"{seed}/{mine.index}"] = [(values[0], values[1])]
    return clusters
