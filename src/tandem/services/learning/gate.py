"""Whether a candidate may answer users: a decision from measurements, and nothing else.

Pure. The bounds on trusted prompts hold whatever the feedback says; what its chosen answers look
like only tells how much may change. Held-out feedback can only add a reason to refuse. Invariant:
what is decided follows from `Measurements`, so that the stored numbers explain every decision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from tandem.core.learning import GateMode

_Z = 1.645  # one-sided 95%
# Nats a token that chosen answers may lose: what rounding to bfloat16 makes of a likely answer.
ROUNDING = 0.02
_LEAST_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a candidate must keep; docs/learning.md says how the numbers were chosen.

    `quality_drop`: how much log-probability the trusted canary answers may lose against the base,
    in nats a token. `divergence`: how much less likely than the base's own answers the candidate's
    answers to the canary prompts may be under the base, in nats a token of the longer of the two
    (so that brief answers are not punished for being brief); where the chosen answers of the
    feedback are less likely still, by how much more than they, up to `noise`. `faults`: the share
    of the answers read that may be broken. `kept` and `length`: the share of what the chosen
    answers keep of the base's own (its content words; its length) that answers to canary prompts
    must keep at least. `win_rate_margin` and `auc_margin`: how far the lower bound of the change
    on held-out feedback may lie below zero, once there are `least_pairs` pairs or `least_thumbs`
    of each sign; from `least_taught` pairs on, most must have moved the right way.
    `beyond`: how much further from the base, in nats a token, versions may be than one that a
    person published beyond these bounds.
    """

    quality_drop: float = 1.5
    divergence: float = 1.0
    divergence_margin: float = 0.5
    noise: float = 4.75
    faults: float = 0.08
    kept: float = 0.15
    length: float = 0.4
    win_rate_margin: float = 0.1
    auc_margin: float = 0.1
    least_pairs: int = 50
    least_thumbs: int = 25
    least_taught: int = 10
    beyond: float = 0.5

    def after(self, metrics: Mapping[str, Any], *, chosen: bool = True) -> Bounds:
        """What a version must keep that follows one with these `metrics`.

        That is what the one before had to keep. If that one is further from the base than it was
        allowed to be, a person published it nevertheless: where it was `chosen` so, its successors
        may be `beyond` further than it, and keep half of what it keeps.
        """

        def further(name: str, strange: float = 0.0) -> float:
            most = max(getattr(self, name), metrics.get(f"{name}_bound") or 0.0)
            found = metrics.get(f"canary_{name}") or 0.0
            return found + self.beyond if chosen and found > max(most, strange) else most

        def least(name: str) -> float:
            share, found = getattr(self, name), metrics.get(name)
            if (known := metrics.get(f"{name}_bound")) is not None:
                share = min(share, known)
            wanted = metrics.get(f"asked_{name}")
            wanted = 1.0 if wanted is None else min(1.0, wanted)
            if chosen and found is not None and found < share * wanted:
                return float(found / wanted / 2)
            return float(share)

        asked = metrics.get("asked_divergence")
        return replace(
            self,
            quality_drop=further("quality_drop"),
            divergence=further("divergence", 0.0 if asked is None else self.allowed(asked)),
            kept=least("kept"),
            length=least("length"),
        )

    def allowed(self, divergence: float) -> float:
        """How far answers may diverge for feedback whose chosen answers diverge by so much."""
        return max(self.divergence, min(divergence, self.noise) + self.divergence_margin)

    def passed_on(self, usual: Bounds) -> dict[str, float]:
        """What `after` needs of bounds that are not the usual ones, to be kept with the metrics of
        a version."""
        names = ("quality_drop", "divergence", "kept", "length")
        both = {name: (getattr(self, name), getattr(usual, name)) for name in names}
        return {f"{name}_bound": own for name, (own, other) in both.items() if own != other}


@dataclass(frozen=True, slots=True)
class CanaryMeasures:
    """Against the base model, in nats a token over all canary answers (see `Bounds`)."""

    answers: int
    quality_drop: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken answer: what is wrong with it, and how it begins."""

    kind: str
    excerpt: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading the candidate's greedy answers has found, next to the base's own.

    `answers` were read, `faults` are the broken ones among them. Means over the canary prompts, of
    how the answers begin: `kept`, the share of the content words of the base's that are still
    there; `length`, in words, relative to the base's (longer counts as 1).
    """

    answers: int
    faults: tuple[Fault, ...]
    kept: float
    length: float


@dataclass(frozen=True, slots=True)
class Asked:
    """What the feedback's chosen answers ask for, next to the base's own answers to their prompts.

    `kept` and `length` as in `Reading`. `divergence`: how much less likely than the base's own
    they are under the base; `gain`: how much likelier the candidate makes them than the base did;
    both in nats a token, the median of these answers: one odd answer decides nothing. `longer`: how
    many tokens they are longer than the base's own, the median as well, at least 0.
    """

    kept: float
    length: float
    divergence: float
    gain: float
    longer: int = 0


@dataclass(frozen=True, slots=True)
class PairMargins:
    """`log p(chosen) - log p(rejected)` of one held-out pair under three models; `normalised` is
    the candidate's with each answer's log-probability divided by its tokens."""

    reference: float
    current: float
    candidate: float
    normalised: float = 0.0


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
    reading: Reading | None = None
    asked: Asked | None = None


class Outcome(StrEnum):
    """What happens to the candidate; `HOLD` leaves it to a person."""

    PUBLISH = "publish"
    HOLD = "hold"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision, why, and the numbers to keep with the version. `excess`: how many times its
    answers are beyond their bounds where it is refused for nothing else, else 0."""

    outcome: Outcome
    reasons: tuple[str, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    excess: float = 0.0


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
        unsound = reasons == tuple(_answer_objections(measured, bounds))
        excess = _excess(measured, bounds) if unsound else 0.0
        return Verdict(Outcome.REFUSE, reasons, metrics, excess)
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
    if (reading := measured.reading) is not None:
        found["answers_read"] = reading.answers
        found["broken_answers"] = len(reading.faults)
        found["kept"] = reading.kept
        found["length"] = reading.length
    if (asked := measured.asked) is not None:
        found["chosen_gain"] = asked.gain
        found["asked_kept"] = asked.kept
        found["asked_length"] = asked.length
        found["asked_divergence"] = asked.divergence
        found["asked_longer"] = asked.longer
    if pairs := measured.pairs:
        found["held_out_pairs"] = len(pairs)
        found["win_rate"] = _mean([_win(pair.candidate) for pair in pairs])
        found["win_rate_before"] = _mean([_win(pair.current) for pair in pairs])
        found["win_rate_per_token"] = _mean([_win(pair.normalised) for pair in pairs])
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
    if measured.canary is not None and not _is_finite(measured.canary):
        return ["the model's output is not finite"]
    return [
        *_canary_objections(measured, bounds),
        *_answer_objections(measured, bounds),
        *_gain_objections(measured),
        *_held_out_objections(measured, bounds),
    ]


def _canary_objections(measured: Measurements, bounds: Bounds) -> list[str]:
    canary, asked, found = measured.canary, measured.asked, []
    if canary is None:
        return []
    if canary.quality_drop > bounds.quality_drop:
        found.append(
            f"canary answers lost {canary.quality_drop:.2f} nats a token "
            f"(bound: {bounds.quality_drop:.2f})"
        )
    most = bounds.divergence if asked is None else bounds.allowed(asked.divergence)
    if canary.divergence > most:
        found.append(
            f"answers to canary prompts are {canary.divergence:.2f} nats a token less likely "
            f"under the base (bound: {most:.2f})"
        )
    if asked is not None and asked.divergence > bounds.noise:
        found.append(
            f"the chosen answers read like noise to the base model: {asked.divergence:.2f} nats a "
            f"token less likely than its own (bound: {bounds.noise:.2f})"
        )
    return found


def _answer_objections(measured: Measurements, bounds: Bounds) -> list[str]:
    reading, asked, found = measured.reading, measured.asked, list[str]()
    if reading is not None:
        faults = reading.faults
        if len(faults) > bounds.faults * reading.answers:
            kind, number = Counter(fault.kind for fault in faults).most_common(1)[0]
            excerpt = next(fault.excerpt for fault in faults if fault.kind == kind)
            found.append(
                f"{len(faults)} of {reading.answers} answers are broken, {number} by {kind}: "
                f"'{excerpt}'"
            )
        for name, is_, wanted, share in (
            ("content words", reading.kept, asked.kept if asked else 1.0, bounds.kept),
            ("length", reading.length, asked.length if asked else 1.0, bounds.length),
        ):
            if is_ < share * min(1.0, wanted):
                found.append(
                    f"answers to canary prompts keep {is_:.0%} of their {name}, where the feedback "
                    f"keeps {wanted:.0%} (bound: {share * min(1.0, wanted):.0%})"
                )
    return found


def _excess(measured: Measurements, bounds: Bounds) -> float:
    """How many times answers are beyond the bound that they exceed the most."""
    reading, asked = measured.reading, measured.asked
    if reading is None:
        return 0.0
    kept = bounds.kept * min(1.0, asked.kept if asked else 1.0)
    length = bounds.length * min(1.0, asked.length if asked else 1.0)
    return max(
        len(reading.faults) / max(bounds.faults * reading.answers, _LEAST_SHARE),
        kept / max(reading.kept, _LEAST_SHARE),
        length / max(reading.length, _LEAST_SHARE),
    )


def _gain_objections(measured: Measurements) -> list[str]:
    if measured.reading is None and measured.canary is not None:
        return ["its answers could not be read"]
    # Turned so that a value that is not a number objects, too.
    if measured.asked is not None and not measured.asked.gain >= -ROUNDING:
        return [f"chosen answers became less likely, by {-measured.asked.gain:.2f} nats a token"]
    return []


def _held_out_objections(measured: Measurements, bounds: Bounds) -> list[str]:
    found, pairs = [], measured.pairs
    if len(pairs) >= bounds.least_pairs:
        low = win_rate_change(pairs)
        if not low >= -bounds.win_rate_margin:
            found.append(f"the held-out win rate may have fallen by {-low:.2f}")
    if len(pairs) >= bounds.least_taught:
        won = _mean([_win(pair.candidate - pair.reference) for pair in pairs])
        if not won >= 0.5:
            found.append(f"of {len(pairs)} held-out pairs only {won:.0%} moved the right way")
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
