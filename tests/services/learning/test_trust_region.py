"""How far one version moves the model at least and at most, and how much each of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from fake_engine import FakeEngine, Script
from fake_scores import score_of
from learning_world import World, settled, state_of, world
from serving import demo_tokenizer
from tandem.core.learning import SampleKind, SampleState, VersionRecord, VersionState
from tandem.core.request import Request
from tandem.core.training import Role, ScoreRequest, TrainingSequence, TrainingStep
from tandem.services.learning.gate import Bounds
from tandem.services.learning.settings import LearningSettings
from tandem.store import adapters, events
from tandem.store.tables import REFERENCES

SOUND = "Wolves live in packs and hunt together in the forest."
SETTINGS = LearningSettings(
    batch_samples=4, steps_per_version=1, epochs=6, version_wait_s=0.0, replay=0.0
)
PATIENT = replace(SETTINGS, epochs=80)


def drifting(made: World, share: float, growth: float) -> None:
    """After n updates the working parameters have used `share + growth * n**2` of the bound."""

    def score(request: ScoreRequest, under: str | None) -> float:
        usual = score_of(request.tokens, request.prompt_tokens, None)
        if under is None or not under.startswith("working/"):
            return usual if under is None else 0.9 * usual
        updates = int(under.rpartition("@")[2])
        lost = (share + growth * updates**2) * Bounds().quality_drop
        return usual - lost * (len(request.tokens) - request.prompt_tokens)

    made.engine.score_as = score


def learned_at_once(sequence: TrainingSequence, revision: int) -> float:
    """What is preferred is nearly certain after any update."""
    before = score_of(sequence.tokens, sequence.prompt_tokens, None)
    return 0.01 * before if sequence.role is Role.CHOSEN else 10.0 * before


def learned_never(sequence: TrainingSequence, revision: int) -> float:
    """Nothing changes."""
    return score_of(sequence.tokens, sequence.prompt_tokens, None)


def gained_by_a_tenth(sequence: TrainingSequence, revision: int) -> float:
    """Of what an answer lacks, each update gains a tenth; far from certain after eight."""
    before = score_of(sequence.tokens, sequence.prompt_tokens, None)
    return max(0.1, 1.0 - 0.1 * revision) * before


async def learn(made: World, *weights: float, kind: SampleKind = SampleKind.DPO) -> None:
    given = [made.sample(kind, weight=weight) for weight in weights]
    await made.give(given)
    made.learner.notify("formal")
    await settled(made)
    assert {await state_of(made, each) for each in given} == {SampleState.CONSUMED}


@pytest.mark.parametrize(("growth", "steps"), [(0.0, 6), (0.03, 3), (0.1, 2), (0.3, 1)])
async def test_a_version_ends_before_the_epoch_that_would_leave_the_region(
    tmp_path: Path, growth: float, steps: int
) -> None:
    """Three epochs use 0.27 of the bound, the last 0.15; another would use more than 0.35."""
    async with world(tmp_path, engine=FakeEngine(), settings=SETTINGS) as made:
        drifting(made, 0.0, growth)
        await learn(made, 1.0, 1.0, 1.0, 1.0)
        assert len(made.engine.steps) == steps


@pytest.mark.parametrize(("weight", "steps"), [(1.0, 9), (0.5, 18)])
async def test_the_first_version_goes_on_when_its_samples_are_likely_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: float, steps: int
) -> None:
    """By nine full steps at least. The next version ends as soon as most samples are learned."""
    monkeypatch.setattr("fake_engine.logprob_at", learned_at_once)
    patient = replace(SETTINGS, epochs=20)
    async with world(tmp_path, engine=FakeEngine(), settings=patient) as made:
        drifting(made, 0.0, 0.0)
        await learn(made, *[weight] * 4)
        assert len(made.engine.steps) == steps
        await learn(made, *[weight] * 4)
        assert len(made.engine.steps) == steps + 1


async def test_another_try_at_half_the_rate_takes_twice_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that each goes as far."""

    def collapse(request: ScoreRequest, under: str | None) -> float:
        usual = score_of(request.tokens, request.prompt_tokens, None)
        return usual * 5 if under and "candidate" in under else usual

    monkeypatch.setattr("fake_engine.logprob_at", learned_at_once)
    large = replace(SETTINGS, epochs=9, steps_per_version=4)
    async with world(tmp_path, engine=FakeEngine(score_as=collapse), settings=large) as made:
        given = [made.sample() for _ in range(4)]
        await made.give(given)
        made.learner.notify("formal")
        await settled(made)
        assert {await state_of(made, each) for each in given} == {SampleState.REFUSED}
        assert [each.metrics["steps"] for each in await versions(made)] == [9, 18, 36]


@pytest.mark.parametrize(
    ("broken", "growth", "steps", "looks"),
    [
        (lambda steps: 0, 0.0, [9], 0),
        (lambda steps: 6 * (steps < 12), 0.0, [13], 1),
        (lambda steps: 4, 0.0, [13, 26, 52], 3),  # they get no sounder
        (lambda steps: 5 if steps < 12 else 3, 0.0, [15, 26, 52], 4),
        (lambda steps: 4, 0.005, [12, 12, 12], 3),
    ],
)
async def test_a_candidate_with_broken_answers_goes_on_while_it_may(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[int], int],
    growth: float,
    steps: list[int],
    looks: int,
) -> None:
    """Of six answers. The gate looks when most is learned, or the model has moved far; then every
    four full steps, until they are sound or get no sounder, all epochs are made, or another one may
    leave the region.
    """
    monkeypatch.setattr("fake_engine.logprob_at", learned_at_once)
    patient = replace(SETTINGS, epochs=15, steps_per_version=4)
    engine, asked = FakeEngine(), Counter[int]()
    says = [demo_tokenizer().encode(text, add_special_tokens=False) for text in (SOUND, "ha " * 20)]

    def answer(request: Request, index: int) -> Script:
        if request.adapter is None or not request.adapter.startswith("~candidate"):
            return Script(tokens=says[0])
        asked[len(engine.steps)] += 1
        return Script(tokens=says[asked[len(engine.steps)] <= broken(len(engine.steps))])

    engine.play = answer
    async with world(tmp_path, engine=engine, settings=patient) as made:
        drifting(made, 0.0, growth)
        given = [made.sample() for _ in range(4)]
        await made.give(given)
        made.learner.notify("formal")
        await settled(made)
        found = await versions(made)
        assert [each.metrics["steps"] for each in found] == steps
        told = [each.message for each in await made.store.read(events.listed, "formal", limit=99)]
        assert sum("answers are broken" in each and "goes on" in each for each in told) == looks
        assert (found[0].state is VersionState.PUBLISHED) == (len(steps) == 1)
        scored = await made.store.read(lambda c: c.scalars(sa.select(REFERENCES.c.reference)).all())
        of_adapters = {name.partition("@")[0] for name in scored if "@" in name}
        assert of_adapters <= {each.content_hash for each in found}  # nothing is left of the others


@pytest.mark.parametrize(("weight", "steps"), [(1.0, 24), (0.5, 48), (0.25, 80)])
async def test_a_version_ends_with_the_epoch_that_reaches_24_full_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight: float, steps: int
) -> None:
    """However few its samples are, and however little it learns; or by `epochs`."""
    monkeypatch.setattr("fake_engine.logprob_at", learned_never)
    async with world(tmp_path, engine=FakeEngine(), settings=PATIENT) as made:
        drifting(made, 0.0, 0.0)
        await learn(made, *[weight] * 4)
        assert len(made.engine.steps) == steps


async def test_less_room_makes_no_more_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_engine.logprob_at", learned_never)
    async with world(tmp_path, engine=FakeEngine(), settings=PATIENT) as made:
        drifting(made, 0.3, 0.0)
        await learn(made, 1.0, 1.0, 1.0, 1.0)
        first = len(made.engine.steps)
        await learn(made, 1.0, 1.0, 1.0, 1.0)
        assert [step.scale for step in made.engine.steps[first:]] == pytest.approx([0.7] * 24)


async def test_demonstrations_are_learned_when_they_gained_most_of_what_they_lacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when they are certain: a loss of a tenth of a nat a token is known by heart."""
    monkeypatch.setattr("fake_engine.logprob_at", gained_by_a_tenth)
    async with world(tmp_path, engine=FakeEngine(), settings=PATIENT) as made:
        drifting(made, 0.0, 0.0)
        await learn(made, *[0.5] * 4, kind=SampleKind.SFT)
        assert len(made.engine.steps) == 18  # nine full steps, as the first version of any kind
        assert all(each.reference < 0 for step in made.engine.steps for each in flat(step))


def flat(step: TrainingStep) -> list[TrainingSequence]:
    return [each for batch in step.micro_batches for each in batch]


async def test_an_adapter_near_the_bound_moves_in_smaller_steps(tmp_path: Path) -> None:
    async with world(tmp_path, engine=FakeEngine(), settings=SETTINGS) as made:
        drifting(made, 0.0, 0.3)
        await learn(made, 1.0, 1.0, 1.0, 1.0)
        drifting(made, 0.45, 0.05)  # 0.5 after the first version's update, 0.65 after another
        await learn(made, 1.0, 1.0, 1.0, 1.0)
        assert [step.scale for step in made.engine.steps] == pytest.approx([1.0, 0.5])
        rates = [each.metrics["learning_rate"] for each in await versions(made)]
        assert rates == pytest.approx([1e-3, 5e-4])


@pytest.mark.parametrize(
    ("weights", "scale"),
    [((1.0,) * 4, 1.0), ((0.25,) * 4, 0.25), ((1.0,), 0.25), ((9.0,) * 4, 1.0)],
)
async def test_less_evidence_moves_the_model_less(
    tmp_path: Path, weights: tuple[float, ...], scale: float
) -> None:
    """AdamW would cancel a factor that all samples of a step share."""
    async with world(tmp_path, engine=FakeEngine(), settings=SETTINGS) as made:
        drifting(made, 0.0, 0.3)
        await learn(made, *weights)
        assert [step.scale for step in made.engine.steps] == pytest.approx([scale])


async def versions(made: World) -> list[VersionRecord]:
    return list(await made.store.read(adapters.versions, "formal"))
