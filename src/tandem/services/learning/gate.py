"""Whether a candidate may answer users: a decision from measurements, and nothing else.

Pure. Two bounds on a trusted canary set hold whatever the feedback says; held-out feedback can only
add a reason to refuse. Invariant: what is decided follows from `Measurements`, so that the stored
numbers explain every decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tandem.core.learning import GateMode

_Z = 1.645  # one-sided 95%


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a candidate must keep; docs/learning.md says how the numbers were chosen.

    `quality_drop`: how much log-probability the trusted canary answers may lose against the base,
    in nats a token. `divergence`: how much less likely than the base's own answers the candidate's
    answers to the canary prompts may be under the base, in nats a token of the longer of the two
    (so that brief answers are not punished for being brief). `win_rate_margin` and
    `auc_margin`: how far the lower bound of the change on held-out feedback may lie below zero,
    once there are `least_pairs` pairs or `least_thumbs` of each sign.
    """

    quality_drop: float = 1.0
    divergence: float = 1.0
    win_rate_margin: float = 0.1
    auc_margin: float = 0.1
    least_pairs: int = 50
    least_thumbs: int = 25


@dataclass(frozen=True, slots=True)
class CanaryMeasures:
    """Against the base model, in nats a token over all canary answers (see `Bounds`)."""

    answers: int
    quality_drop: float
    divergence: float


@dataclass(frozen=True, slots=True)
class PairMargins:
    """`log p(chosen) - log p(rejected)` of one held-out pair under three models."""

    reference: float
    current: float
    candidate: float


@dataclass(frozen=True, slots=True)
class Thumb:
    """Implicit rewards (log-ratios to the reference) of one held-out labelled answer."""

    desirable: bool
    current: float
    candidate: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """All that the gate looks at. `key_share` is the largest share of one API key in the version's
    samples, `key_cap` what it may be."""

    canary: CanaryMeasures | None
    pairs: tuple[PairMargins, ...] = ()
    thumbs: tuple[Thumb, ...] = ()
    key_share: float = 0.0
    key_cap: float = 1.0


class Outcome(StrEnum):
    """What happens to the candidate; `HOLD` leaves it to a person."""

    PUBLISH = "publish"
    HOLD = "hold"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision, why, and the numbers to keep with the version."""

    outcome: Outcome
    reasons: tuple[str, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)


def decide(measured: Measurements, mode: GateMode, bounds: Bounds) -> Verdict:
    """Publish, hold or refuse. `always` measures and publishes all that can answer at all; `manual`
    holds what `auto` would publish, and refuses what it would refuse."""
    reasons = tuple(_objections(measured, bounds))
    metrics = summary(measured)
    canary = measured.canary
    if canary is not None and not _is_finite(canary):
        return Verdict(Outcome.REFUSE, reasons, metrics)
    if mode is GateMode.ALWAYS:
        return Verdict(Outcome.PUBLISH, reasons, metrics)
    if reasons:
        return Verdict(Outcome.REFUSE, reasons, metrics)
    return Verdict(Outcome.HOLD if mode is GateMode.MANUAL else Outcome.PUBLISH, (), metrics)


def summary(measured: Measurements) -> dict[str, Any]:
    """The numbers of a version; those that were not measured are absent.

    `win_rate` and `clpd` are MACE's (3.1): raw, without a reference.
    """
    found: dict[str, float] = {}
    if measured.canary is not None:
        found["canary_answers"] = measured.canary.answers
        found["canary_quality_drop"] = measured.canary.quality_drop
        found["canary_divergence"] = measured.canary.divergence
    if pairs := measured.pairs:
        found["held_out_pairs"] = len(pairs)
        found["win_rate"] = _mean([_win(pair.candidate) for pair in pairs])
        found["win_rate_before"] = _mean([_win(pair.current) for pair in pairs])
        found["clpd"] = _mean([pair.candidate for pair in pairs])
        found["clpd_before"] = _mean([pair.current for pair in pairs])
        found["relative_win_rate"] = _mean(
            [_win(pair.candidate - pair.reference) for pair in pairs]
        )
    if measured.thumbs:
        found["held_out_thumbs"] = len(measured.thumbs)
        if len({thumb.desirable for thumb in measured.thumbs}) == 2:
            found["auc"] = auc(measured.thumbs, [thumb.candidate for thumb in measured.thumbs])
            found["auc_before"] = auc(measured.thumbs, [thumb.current for thumb in measured.thumbs])
    found["key_share"] = measured.key_share
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _objections(measured: Measurements, bounds: Bounds) -> list[str]:
    found = []
    canary = measured.canary
    if canary is not None and not _is_finite(canary):
        found.append("the model's output is not finite")
    elif canary is not None:
        if canary.quality_drop > bounds.quality_drop:
            found.append(
                f"canary answers lost {canary.quality_drop:.2f} nats a token "
                f"(bound: {bounds.quality_drop:.2f})"
            )
        if canary.divergence > bounds.divergence:
            found.append(
                f"answers to canary prompts are {canary.divergence:.2f} nats a token less likely "
                f"under the base (bound: {bounds.divergence:.2f})"
            )
    if len(measured.pairs) >= bounds.least_pairs:
        low = win_rate_change(measured.pairs)
        # Turned so that a value that is not a number objects, too.
        if not low >= -bounds.win_rate_margin:
            found.append(f"the held-out win rate may have fallen by {-low:.2f}")
    good = [thumb for thumb in measured.thumbs if thumb.desirable]
    bad = [thumb for thumb in measured.thumbs if not thumb.desirable]
    if min(len(good), len(bad)) >= bounds.least_thumbs:
        change = auc(measured.thumbs, [thumb.candidate for thumb in measured.thumbs]) - auc(
            measured.thumbs, [thumb.current for thumb in measured.thumbs]
        )
        if not change >= -bounds.auc_margin:
            found.append(f"the held-out AUC of thumbs fell by {-change:.2f}")
    if measured.key_share > measured.key_cap + 1e-9:
        found.append(
            f"one API key gave {measured.key_share:.0%} of the samples "
            f"(cap: {measured.key_cap:.0%})"
        )
    return found


def _is_finite(canary: CanaryMeasures) -> bool:
    return math.isfinite(canary.quality_drop) and math.isfinite(canary.divergence)


def win_rate_change(pairs: Sequence[PairMargins]) -> float:
    """Lower bound (one-sided 95%, paired, normal) of the reference-relative win rate's change."""
    changes = [
        _win(pair.candidate - pair.reference) - _win(pair.current - pair.reference)
        for pair in pairs
    ]
    mean = _mean(changes)
    variance = math.fsum((change - mean) ** 2 for change in changes) / max(1, len(changes) - 1)
    return mean - _Z * math.sqrt(variance / len(changes))


def auc(thumbs: Sequence[Thumb], rewards: Sequence[float]) -> float:
    """The chance that a desirable answer has the higher reward; ties count half. Both signs must be
    there."""
    good = [r for thumb, r in zip(thumbs, rewards, strict=True) if thumb.desirable]
    bad = [r for thumb, r in zip(thumbs, rewards, strict=True) if not thumb.desirable]
    return _mean([_win(high - low) for high in good for low in bad])


def _win(margin: float) -> float:
    """1, 0, or a half for a tie; not a number stays that."""
    if math.isnan(margin):
        return margin
    return 0.5 if margin == 0.0 else float(margin > 0.0)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
