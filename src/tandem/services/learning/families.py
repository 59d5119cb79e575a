"""The loss families: what a step over samples of each kind is made of, and when one is learned.

One row a kind of sample; the losses themselves are `training/losses.py`, by the same names. Knows
encoded samples, no store and no engine. Invariant: the sequences of a micro-batch list its samples
in order, so that every loss finds its sample again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.learning import SampleKind
from tandem.core.training import Role, TrainingSequence
from tandem.services.learning.encode import Encoded

UNSCORED_LOSS = math.log(2.0)

"""DPO's loss of a pair on which policy and reference agree."""

Form = Callable[[Sequence[Encoded], Encoded | None, int], tuple[TrainingSequence, ...]]
"""The sequences of one micro-batch; see `sequences_of`."""


def smoothing_entropy(smoothing: float) -> float:
    """The least loss of a pair, in nats, whose labels are wrong with this probability (in 0 to 1,
    without the ends)."""
    return -smoothing * math.log(smoothing) - (1.0 - smoothing) * math.log(1.0 - smoothing)


@dataclass(frozen=True, slots=True)
class Family:
    """How samples of one kind are trained on."""

    form: Form
    learned_loss: float
    """At most the loss of a sample that is learned: half of what DPO and KTO begin with; for SFT,
    nats a token."""
    paired: bool = False
    """A sample is two sequences, the preferred one first; else one."""
    mismatched: bool = False
    """Its prompt is forwarded a second time, with another's completion."""
    likelihood: bool = True
    """The likelihood of preferred answers is a term beside the loss (`rpo_alpha`)."""


def sequences_of(
    encoded: Sequence[Encoded], partner: Encoded | None = None, most: int = sys.maxsize
) -> tuple[TrainingSequence, ...]:
    """One micro-batch; all samples are of one kind. References are still 0.

    `partner` is a sample of another micro-batch; a sequence that joins two samples has at most
    `most` tokens.
    """
    return FAMILIES[encoded[0].kind].form(encoded, partner, most)


def micro_batches(encoded: Sequence[Encoded], samples: int, rows: int) -> list[tuple[Encoded, ...]]:
    """Cut a step into micro-batches of up to `samples` samples and `rows` rows (0: any)."""
    batches: list[list[Encoded]] = []
    used = 0
    for item in encoded:
        need = item.rows * (2 if FAMILIES[item.kind].mismatched else 1)
        if not batches or len(batches[-1]) >= samples or (rows and used + need > rows):
            batches.append([])
            used = 0
        batches[-1].append(item)
        used += need
    return [tuple(batch) for batch in batches]


def _targets(
    encoded: Sequence[Encoded], partner: Encoded | None, most: int
) -> tuple[TrainingSequence, ...]:
    return tuple(_sequence(item, item.chosen, Role.TARGET) for item in encoded)


def _pairs(
    encoded: Sequence[Encoded], partner: Encoded | None, most: int
) -> tuple[TrainingSequence, ...]:
    return tuple(
        _sequence(item, completion, role)
        for item in encoded
        for completion, role in ((item.chosen, Role.CHOSEN), (item.rejected, Role.REJECTED))
    )


def _labelled(
    encoded: Sequence[Encoded], partner: Encoded | None, most: int
) -> tuple[TrainingSequence, ...]:
    """KTO's: each prompt is also joined with the completion of a sample before it, as TRL does,
    else with that of `partner`. What is so joined is no sample's own prompt and completion; a
    prompt for which there is no such completion has no KL term."""
    labelled = tuple(
        _sequence(item, item.chosen, Role.DESIRABLE if item.desirable else Role.UNDESIRABLE)
        for item in encoded
    )
    spare = [partner] if partner is not None else []
    matched = {(item.prompt, item.chosen) for item in (*encoded, *spare)}
    mismatched: list[TrainingSequence] = []
    for place, item in enumerate(encoded):
        others = (*encoded[:place][::-1], *encoded[place:][::-1], *spare)
        for other in others:
            fits = len(item.prompt) + len(other.chosen) <= most
            if fits and (item.prompt, other.chosen) not in matched:
                mismatched.append(_sequence(item, other.chosen, Role.MISMATCHED))
                break
    return labelled + tuple(mismatched)


def _sequence(item: Encoded, completion: tuple[int, ...], role: Role) -> TrainingSequence:
    return TrainingSequence(item.prompt + completion, len(item.prompt), role, weight=item.weight)


FAMILIES = {
    SampleKind.SFT: Family(_targets, learned_loss=0.1, likelihood=False),
    SampleKind.DPO: Family(_pairs, learned_loss=UNSCORED_LOSS / 2, paired=True),
    SampleKind.KTO: Family(_labelled, learned_loss=0.25, mismatched=True),
}
