"""Samples made of feedback: which loss, which split, how much weight.

Pure but for the random ids. Invariant: all samples of a conversation are in the same split; what
cannot be trained on is `INVALID` from the beginning, with the reason.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import replace

from tandem.core.errors import InvalidRequest
from tandem.core.learning import (
    Feedback,
    FeedbackKind,
    Sample,
    SampleKind,
    SampleState,
    ServedTokens,
    Split,
)
from tandem.services.learning.encode import Encoder


def make_samples(
    feedback: Feedback, held_out: float, encoder: Encoder, served: ServedTokens | None = None
) -> tuple[Sample, ...]:
    """The samples of one feedback:

    * of a rating r: KTO, desirable from 0.5 on, with weight |2r - 1|;
    * of a pair: DPO;
    * of a demonstration: SFT, and DPO if the original answer is known;
    * of a comment, or with weight 0: none.

    `served`: the token ids in the receipt (None: no receipt).
    """
    split = split_of(feedback.conversation, held_out)
    drafts = [
        Sample(
            sample_id=f"sm-{uuid.uuid4().hex}",
            feedback_id=feedback.feedback_id,
            adapter=feedback.adapter,
            kind=kind,
            created_s=feedback.created_s,
            messages=feedback.messages,
            prompt=feedback.prompt,
            chosen=feedback.chosen,
            rejected=feedback.rejected if kind is SampleKind.DPO else "",
            desirable=feedback.rating is None or feedback.rating >= 0.5,
            weight=weight,
            split=split,
            conversation=feedback.conversation,
            user=feedback.user,
            key_id=feedback.key_id,
            served=served,
        )
        for kind, weight in _losses(feedback)
        if weight > 0
    ]
    return tuple(_examined(sample, encoder) for sample in drafts)


def split_of(conversation: str, held_out: float) -> Split:
    """The split of a new conversation, by its hash.

    The first conversations of an adapter are never held out, and each stays where it was put first:
    `services/feedback/service.py`.
    """
    digest = hashlib.sha256(conversation.encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    return Split.HELD_OUT if place < held_out else Split.TRAIN


def _losses(feedback: Feedback) -> list[tuple[SampleKind, float]]:
    match feedback.kind:
        case FeedbackKind.RATING:
            assert feedback.rating is not None
            return [(SampleKind.KTO, abs(2 * feedback.rating - 1) * feedback.weight)]
        case FeedbackKind.PREFERENCE:
            return [(SampleKind.DPO, feedback.weight)]
        case FeedbackKind.DEMONSTRATION:
            kinds = [SampleKind.SFT]
            if feedback.rejected.strip():
                kinds.append(SampleKind.DPO)
            return [(kind, feedback.weight) for kind in kinds]
        case FeedbackKind.COMMENT:
            return []


def _examined(sample: Sample, encoder: Encoder) -> Sample:
    try:
        encoder.encode(sample)
    except InvalidRequest as error:
        return replace(sample, state=SampleState.INVALID, problem=str(error))
    return sample
