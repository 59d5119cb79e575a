"""What a step says of its samples."""

from __future__ import annotations

from tandem.core.training import LossKind, LossSpec, Role, TrainingSequence, TrainingStep
from tandem.services.learning.steps import PreparedStep


def prepared(kind: LossKind, ids: tuple[str, ...], *roles: tuple[Role, float]) -> PreparedStep:
    batch = tuple(TrainingSequence((1, 2, 3), 1, role, reference) for role, reference in roles)
    return PreparedStep(TrainingStep("step", "t", LossSpec(kind), (batch,)), (ids,))


def test_a_pair_is_misjudged_where_its_rejected_answer_is_as_likely() -> None:
    roles = [(Role.CHOSEN, -40.0), (Role.REJECTED, -3.0)] * 3
    step = prepared(LossKind.DPO, ("good", "bad", "not yet"), *roles)
    assert step.misjudged([[-2.0, -4.0, -5.0, -5.0, -11.0, -90.0]]) == {"bad", "not yet"}


def test_a_liked_answer_must_gain_most_of_what_it_lacked() -> None:
    roles = [(Role.DESIRABLE, -60.0)] * 2 + [(Role.UNDESIRABLE, -60.0), (Role.MISMATCHED, -60.0)]
    step = prepared(LossKind.KTO, ("learned", "not yet", "disliked"), *roles)
    assert step.misjudged([[-14.0, -16.0, -90.0, -90.0]]) == {"not yet"}


def test_demonstrations_are_judged_where_they_have_a_reference() -> None:
    step = prepared(LossKind.SFT, ("shown",), (Role.TARGET, 0.0))
    assert step.misjudged([[-50.0]]) == set()
    step = prepared(LossKind.SFT, ("learned", "not yet"), *[(Role.TARGET, -60.0)] * 2)
    assert step.misjudged([[-14.0, -50.0]]) == {"not yet"}
