"""What an API key may give of a version, and what waits for others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from learning_world import settled, state_of, world
from patience import PATIENCE_S, until
from tandem.core.learning import SampleState, Split, VersionState
from tandem.core.training import TrainingStep
from tandem.services.learning.settings import LearningSettings
from tandem.store import adapters, events


async def test_samples_of_one_key_say_that_they_wait_for_others(tmp_path: Path) -> None:
    settings = LearningSettings(batch_samples=4, key_share=0.5, version_wait_s=0.0)
    async with world(tmp_path, settings=settings) as made:
        await made.give([made.sample(key_id="eager") for _ in range(8)])
        for _ in range(2):
            made.learner.notify("formal")
            await until(lambda: made.store.read(events.listed, "formal"))
            await asyncio.sleep(0.1)
            async with made.learner.settled("formal"):
                pass
        told = [
            event.message for event in await made.store.read(events.listed, "formal", limit=100)
        ]
        assert len([each for each in told if "more than 50%" in each and "key_share" in each]) == 1


@pytest.mark.parametrize("share", [1.0, 0.5])
async def test_one_key_contributes_no_more_than_its_share(tmp_path: Path, share: float) -> None:
    settings = LearningSettings(
        batch_samples=4,
        steps_per_version=1,
        replay=0.0,
        key_share=share,
        epochs=1,
        version_wait_s=0.0,
    )
    async with world(tmp_path, settings=settings) as made:
        eager = [made.sample(key_id="eager") for _ in range(4)]
        other = [made.sample(key_id="other") for _ in range(2)]
        await made.give([*eager, *other])
        made.learner.notify("formal")
        if share == 1.0:
            await settled(made)
            return
        await until(lambda: "formal" in made.engine.adapters)
        await asyncio.sleep(0.3)
        states = [await state_of(made, sample) for sample in eager]
        assert states.count(SampleState.CONSUMED) == 2
        assert {await state_of(made, sample) for sample in other} == {SampleState.CONSUMED}
        record = await made.store.read(adapters.version, "formal", 1)
        assert record is not None and record.metrics["key_share"] == 0.5


@pytest.mark.parametrize(("share", "looked_at"), [(1.0, 8), (0.5, 4)])
async def test_one_key_is_no_more_than_its_share_of_what_measures(
    tmp_path: Path, share: float, looked_at: int
) -> None:
    """Six of one key and two of another are two of each."""
    settings = LearningSettings(batch_samples=4, key_share=share, epochs=1, version_wait_s=0.0)
    async with world(tmp_path, settings=settings) as made:
        held = [
            made.sample(split=Split.HELD_OUT, key_id="eager" if row < 6 else "other")
            for row in range(8)
        ]
        taught = [made.sample(key_id=("eager", "other")[row % 2]) for row in range(4)]
        await made.give([*held, *taught])
        made.learner.notify("formal")
        await settled(made)
        record = await made.store.read(adapters.version, "formal", 1)
        assert record is not None and record.metrics["held_out_pairs"] == looked_at


@pytest.mark.parametrize("found", ["by training", "by encoding"])
@pytest.mark.parametrize("good_others", [0, 1])
async def test_unusable_samples_of_one_key_do_not_condemn_those_of_another(
    tmp_path: Path, found: str, good_others: int
) -> None:
    poison: set[tuple[int, ...]] = set()

    def judge(step: TrainingStep) -> str | None:
        tokens = {s.tokens for batch in step.micro_batches for s in batch}
        return "the loss is not finite" if tokens & poison else None

    settings = LearningSettings(
        batch_samples=4,
        steps_per_version=1,
        replay=0.0,
        key_share=0.5,
        epochs=1,
        version_wait_s=0.0,
    )
    async with world(tmp_path, engine=FakeEngine(judge=judge), settings=settings) as made:
        honest = [made.sample(key_id="honest") for _ in range(2)]
        text = "poison" if found == "by training" else " "
        bad = [made.sample(key_id="other", chosen=text) for _ in range(2 - good_others)]
        if found == "by training":
            encoder = made.tools.encoder(made.tools.defaults)
            encoded = [encoder.encode(sample) for sample in bad]
            poison.update(each.prompt + each.chosen for each in encoded)
        good = [made.sample(key_id="other") for _ in range(good_others)]
        await made.give([*honest, *bad, *good])
        made.learner.notify("formal")
        async with asyncio.timeout(PATIENCE_S):
            while {await state_of(made, sample) for sample in bad} != {SampleState.INVALID}:
                await asyncio.sleep(0.02)
        # As many are learned as of the other key; the others wait.
        expected = [SampleState.CONSUMED] * good_others + [SampleState.ACCEPTED] * (2 - good_others)
        async with asyncio.timeout(PATIENCE_S):
            while sorted([await state_of(made, s) for s in honest]) != sorted(expected):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        assert sorted([await state_of(made, s) for s in honest]) == sorted(expected)
        # What had to wait learns as soon as others have said as much.
        more = [made.sample(key_id="other") for _ in range(2 - good_others)]
        await made.give(more)
        made.learner.notify("formal")
        await settled(made)
        states = [await state_of(made, sample) for sample in [*honest, *good, *more]]
        assert set(states) == {SampleState.CONSUMED}
        for version in await made.store.read(adapters.versions, "formal"):
            assert version.state is VersionState.PUBLISHED
            assert version.metrics["key_share"] == 0.5
