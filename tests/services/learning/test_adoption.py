"""What the store says answers: after a commit of which nobody knew, and beside a load by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_loaded import files_at, known, learn, served, started_with

from fake_engine import FakeEngine
from learning_world import World, lose, world
from patience import PATIENCE_S, until
from tandem.adapters.files import inspect_adapter
from tandem.core.errors import Conflict, StoreError
from tandem.core.learning import VersionState
from tandem.core.ports import EngineState
from tandem.core.version import AdapterVersion
from tandem.services import tasks
from tandem.services.versions import changes as version_changes
from tandem.services.versions.service import Versions
from tandem.store import adapters


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.05)


def shown(made: World) -> float | None:
    return made.registry.get_sample_value("tandem_learning_version", {"adapter": "formal"})


async def test_a_version_whose_commit_nobody_acknowledged_answers(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        lost = lose(made.store, adapters.publish)
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: "formal" in made.engine.adapters)
        [version] = await made.store.read(adapters.versions, "formal")
        assert lost and version.state is VersionState.PUBLISHED
        assert made.engine.adapters["formal"].content_hash == version.content_hash
        await until(lambda: set(made.engine.adapters) == {"formal"} and shown(made) == 1)
        made.tools.freshness.answered("formal@1")
        seen = "tandem_learning_freshness_seconds_count"
        assert made.registry.get_sample_value(seen, {"adapter": "formal"}) == 4
        await learn(made, 2)
        assert (await known(made))[1].parent == 1


async def test_stopping_does_not_wait_for_an_engine_that_is_gone(tmp_path: Path) -> None:
    engine = FakeEngine()

    def dies(point: str) -> None:
        if point == "before adopt":
            engine.state = EngineState.DEAD

    async with world(tmp_path, engine=engine, at=dies) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: engine.state is EngineState.DEAD)
        engine.state = EngineState.DRAINING
        async with asyncio.timeout(PATIENCE_S):
            await made.learner.stop()
        assert engine.published == []
    async with world(tmp_path) as made:
        assert made.engine.adapters["formal"].number == 1


async def test_it_answers_when_the_store_does_again(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        lost = lose(made.store, adapters.publish)
        read, failed = made.store.read, []

        async def away(*given: Any, **named: Any) -> Any:
            if lost and len(failed) < 5:
                failed.append(given)
                raise StoreError("cannot read: the connection is lost")
            return await read(*given, **named)

        made.store.read = away  # type: ignore[method-assign]
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: "formal" in made.engine.adapters)
        assert len(failed) == 5


async def test_what_was_loaded_by_hand_answers_from_the_store_then(tmp_path: Path) -> None:
    content = files_at(tmp_path / "hand", "by hand")
    engine = started_with(tmp_path / "hand")
    async with served(tmp_path / "store", engine) as (made, versions):
        lose(made.store, adapters.publish)
        with pytest.raises(StoreError):
            await versions.create("formal", {})
        [version] = await known(made)
        kept = AdapterVersion("formal", 1, content, version.path)
        await until(lambda: engine.adapters["formal"] == kept)
        assert Path(kept.path).is_relative_to(tmp_path / "store")


Steer = Callable[[Versions], Any]


@pytest.mark.parametrize(
    ("work", "steer", "number"),
    [
        ("roll_back", lambda versions: versions.roll_back("formal", 1), 1),
        ("roll_back", lambda versions: versions.roll_back("formal", 0), 0),
        ("publish", lambda versions: versions.publish("formal", 1), 1),
        ("delete", lambda versions: versions.delete("formal"), 0),
    ],
)
async def test_what_an_administrator_has_committed_answers(
    tmp_path: Path, work: str, steer: Steer, number: int
) -> None:
    files_at(tmp_path / "hand", "by hand")
    engine = started_with(tmp_path / "hand")
    async with served(tmp_path / "store", engine) as (made, versions):
        await learn(made, 2)
        lose(made.store, getattr(version_changes, work))
        with pytest.raises(StoreError):
            await steer(versions)
        if number:
            await until(lambda: engine.adapters["formal"].number == number)
        else:
            await until(lambda: "formal" not in engine.adapters)
        await until(lambda: shown(made) == number)


@pytest.mark.parametrize(
    "steer", [lambda v: v.roll_back("formal", 0), lambda v: v.delete("formal")]
)
async def test_what_is_taken_back_while_the_engine_restarts_stays_away(
    tmp_path: Path, steer: Steer
) -> None:
    files_at(tmp_path / "hand", "by hand")
    engine = started_with(tmp_path / "hand")
    async with served(tmp_path / "store", engine) as (made, versions):
        await learn(made, 2)
        engine.die()
        steering = asyncio.create_task(steer(versions))
        await until(lambda: "formal" not in engine.adapters)  # so that nothing loads it again
        engine.state = EngineState.READY
        await steering
        assert "formal" not in engine.adapters


class SlowToLoad(FakeEngine):
    """Loads files only once `may_load` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.loading = asyncio.Event()
        self.may_load = asyncio.Event()

    async def load_adapter(self, name: str, path: str) -> AdapterVersion:
        """As the fake does, later, and with the hash of the content."""
        if name.startswith("~"):
            return await super().load_adapter(name, path)
        self.loading.set()
        await self.may_load.wait()
        number = self.adapters[name].number + 1 if name in self.adapters else 1
        content_hash = inspect_adapter(path).content_hash
        self.adapters[name] = AdapterVersion(name, number, content_hash, path)
        return self.adapters[name]


async def test_the_first_feedback_waits_for_what_is_being_loaded(tmp_path: Path) -> None:
    """Else its version would answer no more, although the store says so."""
    content = files_at(tmp_path / "hand", "by hand")
    engine = SlowToLoad()
    async with served(tmp_path / "store", engine) as (made, versions):
        loading = asyncio.create_task(versions.imports.load("formal", "hand"))
        await asyncio.wait_for(engine.loading.wait(), PATIENCE_S)
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await asyncio.sleep(0.3)
        engine.may_load.set()
        assert (await loading).label == "formal@1"
        await until(lambda: engine.adapters["formal"].number == 2)
        first, second = await known(made)
        assert (first.number, first.content_hash, first.origin) == (1, content, "import")
        assert (second.number, second.parent) == (2, 1)
        with pytest.raises(Conflict, match="learns here"):
            await versions.imports.load("formal", "hand")


def learns_after_a_look(made: World) -> asyncio.Event:
    """Whoever looks next whether a name learns hears what was so before it began to; set then."""
    read, entered = made.store.read, asyncio.Event()

    async def late(work: Callable[..., Any], *given: Any, **named: Any) -> Any:
        found = await read(work, *given, **named)
        if work is adapters.find and not entered.is_set():
            entered.set()
            await until(lambda: bool(made.engine.trainers))
        return found

    made.store.read = late  # type: ignore[method-assign, assignment]
    return entered


async def test_what_learns_meanwhile_is_not_loaded_over(tmp_path: Path) -> None:
    files_at(tmp_path / "hand", "by hand")
    engine = FakeEngine(step_s=0.2)
    async with served(tmp_path / "store", engine) as (made, versions):
        entered = learns_after_a_look(made)
        # It does not learn yet.
        loading = asyncio.create_task(versions.imports.load("formal", "hand"))
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        with pytest.raises(Conflict, match="learns here"):
            await loading
        [version] = await known(made)
        assert engine.adapters["formal"].content_hash == version.content_hash


async def test_what_is_only_served_may_be_loaded_again(tmp_path: Path) -> None:
    content = files_at(tmp_path / "hand", "by hand")
    engine = SlowToLoad()
    engine.may_load.set()
    async with served(tmp_path / "store", engine) as (made, versions):
        for number in (1, 2):
            loaded = await versions.imports.load("formal", "hand")
            assert (loaded.number, loaded.content_hash) == (number, content)
        assert await known(made) == []


async def test_an_adapter_is_deleted_in_the_middle_of_a_step(tmp_path: Path) -> None:
    async with served(tmp_path / "store", FakeEngine(step_s=3600.0)) as (made, versions):
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: bool(made.engine.trainers))
        await asyncio.wait_for(versions.delete("formal"), PATIENCE_S)
        assert not made.engine.trainers and await known(made) == []


async def test_what_begins_to_learn_is_deleted_as_a_whole(tmp_path: Path) -> None:
    """A name that is only loaded, of which there is a version when it is its turn."""
    files_at(tmp_path / "hand", "by hand")
    engine = started_with(tmp_path / "hand")
    async with served(tmp_path / "store", engine) as (made, versions):
        entered = learns_after_a_look(made)
        deleting = asyncio.create_task(versions.delete("formal"))
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await deleting
        assert "formal" not in engine.adapters and await known(made) == []
