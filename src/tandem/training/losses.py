"""Losses as functions of summed log-probabilities: a value, and one coefficient per sequence.

The engine computes d(log p)/d(hidden) when it scores a sequence, so all that a loss adds is the
number d(loss)/d(log p) of each. Pure arithmetic on floats: no tensor, no model. Invariant: the
coefficients are the exact derivatives of the value, KTO's KL term held constant as in its paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.errors import InvalidRequest
from tandem.core.training import LossKind, LossSpec, Role, TrainingSequence

_LABELLED = (Role.DESIRABLE, Role.UNDESIRABLE)


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """The share of the step's mean loss that one micro-batch has.

    `coefficients[s]` is d(loss)/d(log p of sequence s). `item_losses` are the unweighted losses of
    its items in order: sequences' mean per token (SFT), pairs (DPO), labelled sequences (KTO).
    """

    loss: float
    coefficients: tuple[float, ...]
    item_losses: tuple[float, ...]


def step_items(loss: LossSpec, micro_batches: Sequence[Sequence[TrainingSequence]]) -> int:
    """What the step's mean is over: completion tokens (SFT), pairs (DPO), labels (KTO).

    Raises `InvalidRequest` if a micro-batch does not have the form that the loss needs.
    """
    return sum(_items(loss, sequences) for sequences in micro_batches)


def micro_batch_loss(
    loss: LossSpec, sequences: Sequence[TrainingSequence], logprobs: Sequence[float], items: int
) -> MicroBatchLoss:
    """Loss and coefficients of one micro-batch of a step that has `items` items.

    `logprobs[s]` is the summed log-probability of the completion of `sequences[s]`.
    """
    assert len(sequences) == len(logprobs)
    return _LOSSES[loss.kind].value(loss, sequences, logprobs, items)


def _supervised(
    loss: LossSpec, sequences: Sequence[TrainingSequence], logprobs: Sequence[float], items: int
) -> MicroBatchLoss:
    """Negative log-likelihood, the mean over the completion tokens of the step."""
    total = -math.fsum(
        sequence.weight * logprob for sequence, logprob in zip(sequences, logprobs, strict=True)
    )
    return MicroBatchLoss(
        total / items,
        tuple(-sequence.weight / items for sequence in sequences),
        tuple(
            -logprob / sequence.completion_tokens
            for sequence, logprob in zip(sequences, logprobs, strict=True)
        ),
    )


def _preference(
    loss: LossSpec, sequences: Sequence[TrainingSequence], logprobs: Sequence[float], items: int
) -> MicroBatchLoss:
    """DPO (Rafailov et al., 2023, eq. 7), with conservative label smoothing (Mitchell, 2023) and
    the likelihood of the chosen answer (RPO). The items' losses are DPO's part alone."""
    losses, total = [], 0.0
    coefficients: list[float] = []
    for at in range(0, len(sequences), 2):
        chosen, rejected = sequences[at], sequences[at + 1]
        margin = (logprobs[at] - chosen.reference) - (logprobs[at + 1] - rejected.reference)
        z, smooth = loss.beta * margin, loss.label_smoothing
        value = -(1.0 - smooth) * _log_sigmoid(z) - smooth * _log_sigmoid(-z)
        slope = loss.beta * (smooth * _sigmoid(z) - (1.0 - smooth) * _sigmoid(-z))
        likelihood, pull = _likelihood(loss, chosen, logprobs[at])
        losses.append(value)
        total += chosen.weight * (value + likelihood)
        weight = chosen.weight / items
        coefficients += [weight * (slope + pull), -weight * slope]
    return MicroBatchLoss(total / items, tuple(coefficients), tuple(losses))


def _prospect(
    loss: LossSpec, sequences: Sequence[TrainingSequence], logprobs: Sequence[float], items: int
) -> MicroBatchLoss:
    """KTO (Ethayarajh et al., 2024, eq. 8), with the likelihood of desirable answers as in RPO. The
    KL term is the mean log-ratio of the mismatched sequences, not below 0 and without gradient;
    without any it is 0. The items' losses are KTO's part alone."""
    ratios = [
        logprob - sequence.reference for sequence, logprob in zip(sequences, logprobs, strict=True)
    ]
    mismatched = [
        ratio
        for sequence, ratio in zip(sequences, ratios, strict=True)
        if sequence.role is Role.MISMATCHED
    ]
    baseline = max(0.0, math.fsum(mismatched) / len(mismatched)) if mismatched else 0.0
    losses, total = [], 0.0
    coefficients: list[float] = []
    for sequence, ratio, logprob in zip(sequences, ratios, logprobs, strict=True):
        if sequence.role is Role.MISMATCHED:
            coefficients.append(0.0)
            continue
        desirable = sequence.role is Role.DESIRABLE
        sign = 1.0 if desirable else -1.0
        weight = loss.desirable_weight if desirable else loss.undesirable_weight
        gain = _sigmoid(sign * loss.beta * (ratio - baseline))
        likelihood, pull = _likelihood(loss, sequence, logprob) if desirable else (0.0, 0.0)
        losses.append(1.0 - gain)
        total += sequence.weight * weight * (1.0 - gain + likelihood)
        slope = -sign * loss.beta * gain * (1.0 - gain)
        coefficients.append(sequence.weight * weight * (slope + pull) / items)
    return MicroBatchLoss(total / items, tuple(coefficients), tuple(losses))


def _likelihood(loss: LossSpec, sequence: TrainingSequence, logprob: float) -> tuple[float, float]:
    """The likelihood term of an answer to move to, and its slope in the log-probability."""
    pull = -loss.rpo_alpha / sequence.completion_tokens
    return pull * logprob, pull


def _items(loss: LossSpec, sequences: Sequence[TrainingSequence]) -> int:
    roles = [sequence.role for sequence in sequences]
    if any(sequence.completion_tokens < 1 or sequence.prompt_tokens < 1 for sequence in sequences):
        raise InvalidRequest("a training sequence needs a prompt and a completion")
    return _LOSSES[loss.kind].items(sequences, roles)


def _target_tokens(sequences: Sequence[TrainingSequence], roles: Sequence[Role]) -> int:
    if set(roles) - {Role.TARGET}:
        raise InvalidRequest("supervised steps take target sequences alone")
    return sum(sequence.completion_tokens for sequence in sequences)


def _pairs(sequences: Sequence[TrainingSequence], roles: Sequence[Role]) -> int:
    if list(roles) != [Role.CHOSEN, Role.REJECTED] * (len(roles) // 2):
        raise InvalidRequest("DPO steps take pairs: a chosen and then its rejected sequence")
    return len(roles) // 2


def _labels(sequences: Sequence[TrainingSequence], roles: Sequence[Role]) -> int:
    if set(roles) - {*_LABELLED, Role.MISMATCHED}:
        raise InvalidRequest("KTO steps take desirable, undesirable and mismatched sequences")
    return sum(role in _LABELLED for role in roles)


def _sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z)) if z >= 0.0 else math.exp(z) / (1.0 + math.exp(z))


def _log_sigmoid(z: float) -> float:
    return -math.log1p(math.exp(-z)) if z >= 0.0 else z - math.log1p(math.exp(z))


@dataclass(frozen=True, slots=True)
class _Loss:
    """One loss: its value, and how many items a micro-batch of it has (raises `InvalidRequest` for
    sequences of another form)."""

    value: Callable[[LossSpec, Sequence[TrainingSequence], Sequence[float], int], MicroBatchLoss]
    items: Callable[[Sequence[TrainingSequence], Sequence[Role]], int]


_LOSSES = {
    LossKind.SFT: _Loss(_supervised, _target_tokens),
    LossKind.DPO: _Loss(_preference, _pairs),
    LossKind.KTO: _Loss(_prospect, _labels),
}
