"""What a step says of its samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fake_engine import FakeEngine
from learning_world import world
from tandem.core.learning import SampleKind
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.services.learning.references import NotFinite
from tandem.services.learning.steps import Failed, PreparedStep, StepMaker, StepShape, run_steps


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


def test_a_demonstration_must_gain_most_of_what_it_lacked() -> None:
    step = prepared(LossKind.SFT, ("learned", "not yet"), *[(Role.TARGET, -60.0)] * 2)
    assert step.misjudged([[-14.0, -50.0]]) == {"not yet"}


def test_what_a_demonstration_gained_is_not_known_without_a_reference_or_a_number() -> None:
    step = prepared(LossKind.SFT, ("without", "odd"), (Role.TARGET, 0.0), (Role.TARGET, -60.0))
    assert step.misjudged([[-50.0, math.nan]]) == {"without", "odd"}


async def test_what_becomes_of_steps_comes_in_their_order(tmp_path: Path) -> None:
    """Also where a later one cannot be prepared while an earlier one is still running: whoever
    counts them, to go on after a pause, counts none twice and leaves none out."""

    class Maker(StepMaker):
        async def prepare(
            self, step_id: str, sample_ids: Sequence[str], loss: LossSpec, urgency: float
        ) -> PreparedStep:
            if step_id == "bad":
                raise NotFinite("it has no reference")
            return await super().prepare(step_id, sample_ids, loss, urgency)

    async with world(tmp_path, engine=FakeEngine(step_s=0.02)) as made:
        await made.engine.open_trainer(TrainerSpec("t", LoraSpec(4, 8.0)))
        shape = StepShape("t", made.tools.references.base, 4, 512, 4)
        maker = Maker(made.tools.encoder(made.tools.defaults), made.tools.references, shape)
        samples = [made.sample() for _ in range(3)]
        assert maker.admit(samples) == {}
        loss = made.tools.defaults.loss(SampleKind.DPO)
        names = ("first", "bad", "last")
        both = zip(names, samples, strict=True)
        wanted = [(name, (each.sample_id,), loss, 0.0) for name, each in both]
        found = [
            "bad" if isinstance(each, Failed) else each[0].step.step_id
            async for each in run_steps(made.engine, maker, wanted)
        ]
    assert found == list(names)
