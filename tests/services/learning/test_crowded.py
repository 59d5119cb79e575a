"""More trainers than there is memory for: adapters take turns with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from learning_world import OneTrainer, until, world
from tandem.services.learning import learner
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

            await asyncio.wait_for(both_learned(), 20)
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
