"""Too little memory: adapters take turns with it, and its lack is no fault of the samples."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from fake_scores import score_of
from learning_world import OneTrainer, settled, state_of, world
from patience import PATIENCE_S, until
from tandem.core.errors import NoMemory
from tandem.core.learning import Sample, SampleKind, SampleState
from tandem.core.plan import NO_MEMORY
from tandem.core.training import LossKind, ScoreRequest, TrainingStep
from tandem.services.learning import block_trainer, learner
from tandem.store import events


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "_LOOK_FOR_ROOM_S", 0.05)
    monkeypatch.setattr(learner, "_MAKE_ROOM_S", 0.2)


async def test_adapters_take_turns_with_the_memory(tmp_path: Path) -> None:
    async with world(tmp_path, engine=OneTrainer(step_s=0.01)) as made:
        for _ in range(3):  # neither rests of itself, within the test
            for name in ("formal", "casual"):
                await made.give([made.sample(adapter=name) for _ in range(4)])
                made.learner.notify(name)
            numbers = {name: each.number for name, each in made.engine.adapters.items()}

            async def both_learned(before: dict[str, int] = numbers) -> None:
                while any(
                    name not in made.engine.adapters
                    or made.engine.adapters[name].number <= before.get(name, 0)
                    for name in ("formal", "casual")
                ):
                    await asyncio.sleep(0.02)

            await asyncio.wait_for(both_learned(), PATIENCE_S)
        for name in ("formal", "casual"):
            for event in await made.store.read(events.listed, name):
                assert event.level == "info", event


async def test_one_that_always_learns_lets_another_one_learn(tmp_path: Path) -> None:
    async with world(tmp_path, engine=OneTrainer(step_s=0.01)) as made:

        async def feed() -> None:
            while True:
                await made.give([made.sample() for _ in range(8)])
                made.learner.notify("formal")
                await asyncio.sleep(0.05)

        feeding = asyncio.create_task(feed())
        try:
            await until(lambda: "formal" in made.engine.adapters)
            await made.give([made.sample(adapter="casual") for _ in range(4)])
            made.learner.notify("casual")
            await until(lambda: "casual" in made.engine.adapters)
            number = made.engine.adapters["formal"].number
            await until(lambda: made.engine.adapters["formal"].number > number)
        finally:
            feeding.cancel()


async def test_a_shortage_for_reference_scores_is_no_samples_fault(tmp_path: Path) -> None:
    """Also where one sample is alone, which could be too large for a step."""
    short = [NoMemory(NO_MEMORY)] * 5

    def score_as(request: ScoreRequest, under: str | None) -> float:
        if short:
            raise short.pop()
        return score_of(request.tokens, request.prompt_tokens, under)

    async with world(tmp_path, engine=FakeEngine(score_as=score_as)) as made:
        sample = made.sample()
        await made.give([sample])
        made.learner.notify("formal")
        await settled(made)
        assert not short and await state_of(made, sample) is SampleState.CONSUMED


@pytest.mark.parametrize("alone", [True, False])
async def test_a_passing_shortage_is_no_fault_of_samples_that_came_late(
    tmp_path: Path, alone: bool
) -> None:
    """Of several steps the first found room; one that is alone is tried several times."""
    judged = list[TrainingStep]()

    def judge(step: TrainingStep) -> str | None:
        judged.append(step)
        return NO_MEMORY if len(judged) in (range(1, 5) if alone else range(2, 8)) else None

    async with world(tmp_path, engine=FakeEngine(judge=judge)) as made:
        given = [made.sample() for _ in range(1 if alone else 8)]
        await made.give(given)
        made.learner.notify("formal")
        await until(lambda: len(judged) >= 7 or (alone and len(judged) >= 5))
        await settled(made)
        assert {await state_of(made, each) for each in given} == {SampleState.CONSUMED}


@pytest.mark.parametrize("others", [0, 8])
async def test_a_sample_for_which_there_is_never_room_is_invalid_in_the_end(
    tmp_path: Path, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and beside some that are learned meanwhile; whatever the clock is set to."""
    monkeypatch.setattr(block_trainer, "_SHORT_FOR_S", 0.2)
    started_s = time.time()
    tried = list[TrainingStep]()

    def judge(step: TrainingStep) -> str | None:
        if step.loss.kind is not LossKind.SFT:
            return None
        tried.append(step)
        return NO_MEMORY

    def now() -> float:
        return started_s - 3600.0 * len(tried)

    async with world(tmp_path, engine=FakeEngine(judge=judge), now=now) as made:
        large, small = made.sample(SampleKind.SFT), [made.sample() for _ in range(others)]
        await made.give([large, *small])
        made.learner.notify("formal")
        await settled(made)
        assert await state_of(made, large) is SampleState.INVALID and len(tried) >= 8
        assert all([await state_of(made, each) is SampleState.CONSUMED for each in small])


async def test_samples_that_find_no_room_beside_others_are_tried_again(tmp_path: Path) -> None:
    """Also where, one by one, the first of them finds some before it is gone again."""
    judged = list[TrainingStep]()

    def judge(step: TrainingStep) -> str | None:
        judged.append(step)
        return NO_MEMORY if len(judged) in {2, 4, 5, 6} else None  # step 2 of 2; three of its four

    async with world(tmp_path, engine=FakeEngine(judge=judge)) as made:
        given = [made.sample() for _ in range(8)]
        await made.give(given)
        made.learner.notify("formal")
        await settled(made)
        assert {await state_of(made, each) for each in given} == {SampleState.CONSUMED}
        assert made.engine.adapters["formal"].number == 2


@pytest.mark.parametrize("all_fail", [True, False])
async def test_a_shortage_of_memory_is_no_fault_of_the_samples_unless_others_find_some(
    tmp_path: Path, all_fail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_trainer, "_SHORT_FOR_S", 0.2)
    large: set[tuple[int, ...]] = set()
    judged = list[TrainingStep]()

    def judge(step: TrainingStep) -> str | None:
        judged.append(step)
        short = all_fail and len(judged) <= 20  # twice two steps, and each sample alone
        tokens = {s.tokens for batch in step.micro_batches for s in batch}
        return NO_MEMORY if short or tokens & large else None

    async def learned(sample: Sample) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await state_of(made, sample) is not SampleState.CONSUMED:
                await asyncio.sleep(0.02)

    async with world(tmp_path, engine=FakeEngine(judge=judge)) as made:
        given = [made.sample() for _ in range(8)]
        few = given[:2] if not all_fail else []
        for each in few:
            encoded = made.tools.encoder(made.tools.defaults).encode(each)
            large.add(encoded.prompt + encoded.chosen)
        await made.give(given)
        made.learner.notify("formal")
        for each in given:
            if each not in few:
                await learned(each)
        await settled(made)
        for each in few:
            assert await state_of(made, each) is SampleState.INVALID
        assert not all_fail or len(judged) > 20
