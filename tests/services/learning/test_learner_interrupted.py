"""Learning that is interrupted: the engine dies, an adapter is held or deleted, there is no room;
it waits, gives up or goes on, and leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from learning_world import kill, note_waits, settled, state_of, world
from patience import PATIENCE_S, until
from tandem.core.errors import EngineDead, StoreError
from tandem.core.learning import Sample, SampleState
from tandem.core.ports import EngineState
from tandem.core.training import TrainingStep
from tandem.core.version import AdapterVersion
from tandem.services import tasks
from tandem.services.learning import learner
from tandem.services.learning.course import Course, Progress
from tandem.services.learning.recovery import Reconciler
from tandem.store import adapters, events


async def test_engine_death_costs_a_repetition_only(tmp_path: Path) -> None:
    async with world(tmp_path, engine=FakeEngine(step_s=3600.0)) as made:
        given = [made.sample() for _ in range(4)]
        await made.give(given)
        made.learner.notify("formal")
        await until(lambda: "learn/formal" in made.engine.trainers)
        await asyncio.sleep(0.1)
        made.engine.die()

        async def free() -> bool:
            return {await state_of(made, each) for each in given} == {SampleState.ACCEPTED}

        await until(free)
        made.engine.step_s = 0.0
        await made.engine.start()
        await settled(made)
        assert {await state_of(made, sample) for sample in given} == {SampleState.CONSUMED}
        assert made.engine.adapters["formal"].number == 1


async def test_samples_that_kill_the_engine_have_to_wait_longer_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, engine = note_waits(monkeypatch), FakeEngine()
    engine.judge = lambda step: kill(engine)
    async with world(tmp_path, engine=engine) as made:
        given = [made.sample() for _ in range(4)]
        await made.give(given)
        made.learner.notify("formal")
        await until(lambda: len(waits) >= 3)
        assert waits[:3] == [1.0, 2.0, 4.0]
        engine.judge = lambda step: None
        await settled(made)
        assert {await state_of(made, sample) for sample in given} == {SampleState.CONSUMED}


async def test_the_sample_that_kills_the_engine_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_waits(monkeypatch)
    engine, deadly = FakeEngine(), set[tuple[int, ...]]()

    def judge(step: TrainingStep) -> str | None:
        if deadly & {each.tokens for batch in step.micro_batches for each in batch}:
            kill(engine)
        return None

    engine.judge = judge
    async with world(tmp_path, engine=engine) as made:
        given = [made.sample() for _ in range(8)]
        encoded = made.tools.encoder(made.tools.defaults).encode(given[3])
        deadly.add(encoded.prompt + encoded.chosen)
        await made.give(given)
        made.learner.notify("formal")
        await settled(made)
        found = [await state_of(made, sample) for sample in given]
        assert found[3] is SampleState.INVALID
        assert {*found[:3], *found[4:]} == {SampleState.CONSUMED}


@pytest.mark.parametrize("back", [True, False])
async def test_samples_that_came_after_a_death_are_not_blamed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """The trainer that a version left open went with the engine, before they were tried; and while
    there is no engine, none can be."""
    note_waits(monkeypatch)
    blamed = list[Sequence[Sample]]()

    async def noted(course: Course, claimed: Sequence[Sample]) -> None:
        blamed.append(claimed)

    monkeypatch.setattr(Course, "_outlived", noted)
    async with world(tmp_path) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        made.engine.die()
        if back:
            await made.engine.start()
        given = [made.sample() for _ in range(4)]
        await made.give(given)
        made.learner.notify("formal")
        if not back:
            await asyncio.sleep(0.2)
            await made.engine.start()
        await settled(made)
        assert {await state_of(made, sample) for sample in given} == {SampleState.CONSUMED}
    assert blamed == []


async def test_holding_gives_up_what_is_under_way(tmp_path: Path) -> None:
    async with world(tmp_path, engine=FakeEngine(step_s=3600.0)) as made:
        given = [made.sample() for _ in range(4)]
        await made.give(given)
        made.learner.notify("formal")
        await until(lambda: "learn/formal" in made.engine.trainers)
        async with asyncio.timeout(PATIENCE_S), made.learner.held("formal"):
            assert {await state_of(made, sample) for sample in given} == {SampleState.ACCEPTED}
            assert "learn/formal" not in made.engine.trainers
            made.engine.step_s = 0.0
        await settled(made)
        assert made.engine.adapters["formal"].number == 1


async def test_deleting_an_adapter_while_it_learns(tmp_path: Path) -> None:
    async with world(tmp_path, engine=FakeEngine(step_s=3600.0)) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: "learn/formal" in made.engine.trainers)
        async with made.learner.held("formal"):
            await made.store.write(adapters.delete, "formal")
        await asyncio.sleep(0.2)
        assert made.engine.steps == [] and "formal" not in made.engine.adapters


async def test_without_room_learning_waits_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "_LOOK_FOR_ROOM_S", 0.05)
    async with world(tmp_path, max_adapters=1) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        steps = len(made.engine.steps)
        given = [made.sample(adapter="casual") for _ in range(4)]
        await made.give(given)
        made.learner.notify("casual")
        await until(lambda: made.store.read(events.listed, "casual"))
        await asyncio.sleep(0.2)
        assert len(made.engine.steps) == steps
        assert {await state_of(made, sample) for sample in given} == {SampleState.ACCEPTED}
        [event] = await made.store.read(events.listed, "casual")
        assert event.level == "warning" and "--max-adapters" in event.message
        # The one that is served goes on learning.
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        assert made.engine.adapters["formal"].number == 2
        await made.engine.unload_adapter("formal")
        await settled(made, "casual")
        assert made.engine.adapters["casual"].number == 1


async def test_references_leave_the_engine_with_the_trainer(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        await made.store.write(adapters.set_settings, "formal", {"reference": "version:1"})
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        assert "~reference/formal/1" in made.engine.adapters
        await made.learner.discard("formal")
        assert set(made.engine.adapters) == {"formal"}


class SlowToStage(FakeEngine):
    """Goes on staging when the caller has given the call up, as an engine of its own does."""

    staging: asyncio.Task[AdapterVersion] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.may_stage = asyncio.Event()

    async def stage(self, trainer: str, name: str, path: str) -> AdapterVersion:
        """As the fake does, later."""

        async def later() -> AdapterVersion:
            await self.may_stage.wait()
            return await super(SlowToStage, self).stage(trainer, name, path)

        self.staging = asyncio.create_task(later())
        return await asyncio.shield(self.staging)


async def test_a_candidate_that_is_given_up_while_it_is_staged_leaves_nothing(
    tmp_path: Path,
) -> None:
    engine = SlowToStage()
    async with world(tmp_path, engine=engine) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: engine.staging is not None)

        async def hold() -> None:
            async with made.learner.held("formal"):
                assert engine.adapters == {}
                assert list((tmp_path / "adapters" / "formal").iterdir()) == []

        holding = asyncio.create_task(hold())
        await asyncio.sleep(0.05)  # what is under way is cancelled
        assert not holding.done()
        engine.may_stage.set()
        await asyncio.wait_for(holding, PATIENCE_S)


async def test_stopping_together_with_news_does_not_wait(tmp_path: Path) -> None:
    """The wake-up and the cancellation reach the task at once."""
    async with world(tmp_path) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        await asyncio.sleep(0.3)  # its task has nothing to do any more and waits
        made.learner.notify("formal")
        async with asyncio.timeout(PATIENCE_S):
            await made.learner.stop()


class DiesWriting(FakeEngine):
    """Its process ends while it writes a candidate, which the first `stage` is."""

    async def stage(self, trainer: str, name: str, path: str) -> AdapterVersion:
        if not self.published:
            folder = Path(path)
            (folder.parent / f".{folder.name}.4711.partial").mkdir()
            self.published.append(AdapterVersion("", 0, "", ""))
            self.die()
            raise EngineDead("the engine process ended")
        return await super().stage(trainer, name, path)


async def test_what_a_dying_engine_has_half_written_is_gone_with_the_next_version(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, engine=DiesWriting()) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: made.engine.state is EngineState.DEAD)
        folder = tmp_path / "adapters" / "formal"
        await until(lambda: [path.name for path in folder.iterdir()] == [".1.tmp.4711.partial"])
        await made.engine.start()
        await settled(made)
        [version] = await made.store.read(adapters.versions, "formal")
        assert [str(path) for path in folder.iterdir()] == [version.path]


async def test_what_a_failed_commit_has_left_is_gone_with_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.05)
    async with world(tmp_path) as made:
        write, failed = made.store.write, []

        async def fails_once(work: Any, *given: Any, **named: Any) -> Any:
            if work is adapters.publish and not failed:
                failed.append(work)
                raise StoreError("cannot write: the disk is full")
            return await write(work, *given, **named)

        made.store.write = fails_once  # type: ignore[method-assign]
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: "formal" in made.engine.adapters)
        [version] = await made.store.read(adapters.versions, "formal")
        folder = tmp_path / "adapters" / "formal"
        assert failed and version.number == 2
        assert [str(path) for path in folder.iterdir()] == [version.path]


async def test_samples_are_free_again_although_the_disk_was_full_for_their_release(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as made:
        write = made.store.write
        broken = ["stage", "release"]

        async def full(work: Any, *args: Any, **kwargs: Any) -> Any:
            what = "stage" if work is adapters.allocate else work.__name__
            if broken and what == broken[0]:
                broken.pop(0)
                raise StoreError("database or disk is full")
            return await write(work, *args, **kwargs)

        made.store.write = full  # type: ignore[method-assign]
        given = [made.sample() for _ in range(4)]
        await made.give(given)
        made.learner.notify("formal")
        await until(lambda: "formal" in made.engine.adapters)
        assert not broken
        await settled(made)
        assert {await state_of(made, sample) for sample in given} == {SampleState.CONSUMED}


async def test_whoever_holds_an_adapter_goes_before_turns_that_wait(tmp_path: Path) -> None:
    """And a turn that waits takes no slot from other adapters."""
    async with world(tmp_path) as made:
        await made.learner.stop()
        course, slots = Course("formal", made.tools), asyncio.Semaphore(1)
        await made.give(given := [made.sample() for _ in range(4)])
        async with course.settled():
            turn = asyncio.create_task(course.turn(slots))
            await asyncio.sleep(0.05)
            assert not slots.locked()

            async def hold() -> set[SampleState]:
                async with course.held():
                    return {await state_of(made, sample) for sample in given}

            holding = asyncio.create_task(hold())
            await asyncio.sleep(0.05)
        assert await turn is Progress.SOON and await holding == {SampleState.ACCEPTED}
        assert await course.turn(slots) is Progress.LEARNED


async def test_whoever_holds_an_adapter_waits_for_no_other_adapter(tmp_path: Path) -> None:
    """A turn that waits for a slot keeps nobody from the adapter, and is taken again."""
    async with world(tmp_path) as made:
        await made.learner.stop()
        course, slots = Course("formal", made.tools), asyncio.Semaphore(1)
        await made.give(given := [made.sample() for _ in range(4)])
        async with slots:  # by another adapter, for as long as it trains
            turn = asyncio.create_task(course.turn(slots))
            await asyncio.sleep(0.05)
            async with course.held():
                states = {await state_of(made, sample) for sample in given}
            assert states == {SampleState.ACCEPTED} and await turn is Progress.IDLE
        assert await course.turn(slots) is Progress.LEARNED


async def test_what_is_committed_waits_for_no_other_adapter(tmp_path: Path) -> None:
    """It answers although others train in all slots."""
    async with world(tmp_path) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        await until(lambda: set(made.engine.adapters) == {"formal"})
        committed = dict(made.engine.adapters)
        made.engine.adapters = {}
        course, slots = Course("formal", made.tools), asyncio.Semaphore(1)
        course.doubtful = True
        async with slots:
            turn = asyncio.create_task(course.turn(slots))
            await until(lambda: made.engine.adapters == committed)
            assert not turn.done()
        assert await turn is Progress.IDLE


async def test_under_a_policy_that_never_trains_samples_wait_as_they_are(tmp_path: Path) -> None:
    async with world(tmp_path, trains=False) as made:
        await made.give(given := [made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await asyncio.sleep(0.1)
        assert {await state_of(made, sample) for sample in given} == {SampleState.ACCEPTED}
        assert not made.engine.trainers
        async with made.learner.held("formal"):
            pass


async def test_a_version_that_the_engine_has_lost_answers_again(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        await until(lambda: set(made.engine.adapters) == {"formal"})
        [current] = made.engine.adapters.values()
        watch = Reconciler(made.tools, made.learner)
        old = AdapterVersion("formal", 0, "other", str(tmp_path))
        for wrong in ({}, {"formal": old}):
            made.engine.adapters = dict(wrong)
            await watch.look()
            assert made.engine.adapters == {"formal": current}


async def test_a_version_that_cannot_be_loaded_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        await until(lambda: set(made.engine.adapters) == {"formal"})
        version = await made.store.read(adapters.version, "formal", 1)
        assert version is not None
        lost = replace(version, path=str(tmp_path / "broken"))
        await made.store.write(adapters.save_version, lost)
        watch = Reconciler(made.tools, made.learner)
        for _ in range(3):
            await watch.look()
        told = [record.message for record in caplog.records if "current version" in record.message]
        assert len(told) == 1 and "formal" in told[0]
