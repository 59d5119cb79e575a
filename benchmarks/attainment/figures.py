"""From windows to figures: attainment, latencies, rates, and paired differences of attainment.

Knows no engine. A request attains if it ended inside both objectives; one that was still running
when it no longer could is a miss. Training and output tokens count while requests arrive, not in
the time that the last ones take to end. Invariant: policies are compared on the same requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.reporting.bootstrap import Clusters, Interval, nested_difference
from tandem.bench.measure import Outcome, distribution
from tandem.core.slo import Slo

BASELINE = "no_retrain"
OURS = "unified"
# How far below the baseline's an attainment may be, as a share of the requests.
MARGIN = 0.01


@dataclass
class Measurement:
    """One policy in one window; `load` is a share of the capacity. See `engine.Window.run`.

    `others` is the share of the cores that was taken by anything but the engine and its client.
    """

    policy: str
    load: float
    round: int
    seconds: float
    outcomes: list[Outcome]
    output_tokens: int
    step_ends_s: list[float]
    step_tokens: int
    others: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)
    prediction_errors: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def training_tokens(self) -> int:
        """Of the steps that ended while requests arrived."""
        return self.step_tokens * sum(end_s <= self.seconds for end_s in self.step_ends_s)


def measurement(
    policy: str, load: float, round_: int, answer: dict[str, Any], others: float = 0.0
) -> Measurement:
    """From an engine's answer."""
    outcomes = [Outcome(**each) for each in answer["outcomes"]]
    return Measurement(policy, load, round_, **{**answer, "outcomes": outcomes, "others": others})


@dataclass(frozen=True)
class Unloaded:
    """Medians of requests that were alone on the device, seconds."""

    ttft_s: float
    tpot_s: float


def unloaded(answer: dict[str, Any]) -> Unloaded:
    """From a closed loop of one request at a time."""
    outcomes = [each for one in answer["outcomes"] if (each := Outcome(**one)).error is None]
    assert outcomes, "no request ended while it was alone: give it more time"
    return Unloaded(
        median(each.ttft_s for each in outcomes if each.ttft_s is not None),
        median(each.tpot_s for each in outcomes if each.tpot_s is not None),
    )


def capacity(answer: dict[str, Any], settle_s: float) -> float:
    """Requests/s of a closed loop after its first `settle_s` seconds."""
    ends_s = [each["ended_s"] for each in answer["outcomes"] if each["error"] is None]
    ended = sum(settle_s < end_s <= answer["seconds"] for end_s in ends_s)
    return float(ended / (answer["seconds"] - settle_s))


def summary(windows: Sequence[Measurement], slo: Slo) -> dict[str, Any]:
    """Figures of one policy under one load, over all its rounds. Latencies in milliseconds, of the
    requests that ended; a percentile is absent if none did."""
    outcomes = [each for window in windows for each in window.outcomes]
    complete = [each for each in outcomes if each.error is None]
    seconds = sum(window.seconds for window in windows)
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "unfinished": len(outcomes) - len(complete),
        "attainment": _share([each.meets(slo) for each in outcomes]),
        "ttft_attainment": _share([meets_ttft(each, slo) for each in outcomes]),
        "tpot_attainment": _share([meets_tpot(each, slo) for each in outcomes]),
        "output_tokens_per_s": sum(window.output_tokens for window in windows) / seconds,
        "training_tokens_per_s": sum(window.training_tokens for window in windows) / seconds,
    }
    latencies = {
        "ttft": [each.ttft_s for each in complete if each.ttft_s is not None],
        "tpot": [each.tpot_s for each in complete if each.tpot_s is not None],
        "client_lag": [each.sent_s - each.intended_s for each in outcomes],
    }
    for name, values in latencies.items():
        if (spread := distribution(values)) is not None:
            found[f"{name}_p50_ms"] = 1e3 * spread.p50
            found[f"{name}_p99_ms"] = 1e3 * spread.p99
    return found


def meets_ttft(outcome: Outcome, slo: Slo) -> bool:
    """True if the first token came in time, whatever came later."""
    return outcome.ttft_s is not None and outcome.ttft_s <= slo.ttft_s


def meets_tpot(outcome: Outcome, slo: Slo) -> bool:
    """True if it ended and its tokens came in time after the first one."""
    return outcome.error is None and (outcome.tpot_s or 0.0) <= slo.tpot_s


def pairs(
    ours: Sequence[Measurement], theirs: Sequence[Measurement], slo: Slo
) -> dict[str, list[tuple[float, float]]]:
    """Whether each request attained under (ours, theirs), by load and round.

    Rounds that only one of the two has are left out.
    """
    other = {(each.load, each.round): each for each in theirs}
    found: dict[str, list[tuple[float, float]]] = {}
    for window in ours:
        match = other.get((window.load, window.round))
        if match is None or not window.outcomes:
            continue
        met = {each.index: each.meets(slo) for each in match.outcomes}
        assert met.keys() == {each.index for each in window.outcomes}, "not the same requests"
        found[f"{window.load}/{window.round}"] = [
            (float(each.meets(slo)), float(met[each.index])) for each in window.outcomes
        ]
    return found


def gap(clusters: Clusters) -> Interval:
    """Difference of the attainments as a share, with its interval.

    Rounds are drawn, and requests within them: those of a round share its queue and the machine's
    speed.
    """
    return nested_difference(clusters)


@dataclass(frozen=True)
class Verdict:
    """What became of the two goals under one load.

    `sure` if the whole interval is within the margin. `rivals` are the other policies that train
    and attain within it, with their training tokens/s; `ahead` if ours trains more than each in the
    rounds of the latter.
    """

    load: float
    interval: Interval
    within: bool
    sure: bool
    training_tokens_per_s: float
    rivals: dict[str, float]
    ahead: bool


def verdict(load: float, windows: Sequence[Measurement], slo: Slo) -> Verdict | None:
    """Of one load; None unless our policy and the baseline had a round of it in common."""
    by_policy: dict[str, list[Measurement]] = {}
    for window in windows:
        if window.load == load:
            by_policy.setdefault(window.policy, []).append(window)
    if not {OURS, BASELINE} <= by_policy.keys():
        return None
    baseline = by_policy.pop(BASELINE)
    gaps = {
        name: gap(paired)
        for name, each in by_policy.items()
        if (paired := pairs(each, baseline, slo))
    }
    if OURS not in gaps:
        return None
    trained = {name: float(summary(by_policy[name], slo)["training_tokens_per_s"]) for name in gaps}
    ours = trained.pop(OURS)
    rivals = {name: rate for name, rate in trained.items() if gaps[name].value >= -MARGIN}
    # Rivals may have had fewer rounds.
    had = {name: {each.round for each in by_policy[name]} for name in rivals}
    own = by_policy[OURS]
    ours_in = {
        name: summary([each for each in own if each.round in rounds], slo)["training_tokens_per_s"]
        for name, rounds in had.items()
    }
    interval = gaps[OURS]
    return Verdict(
        load,
        interval,
        within=interval.value >= -MARGIN,
        sure=interval.low >= -MARGIN,
        training_tokens_per_s=ours,
        rivals=rivals,
        ahead=all(ours_in[name] > rate for name, rate in rivals.items()),
    )


def _share(met: Sequence[bool]) -> float:
    return sum(met) / len(met) if met else 0.0
