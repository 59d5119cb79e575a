"""Adapters that were loaded by hand and then learn: labels, roll back and restarts."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from learning_world import World, files_at, world
from patience import PATIENCE_S, until
from tandem.adapters.files import inspect_adapter
from tandem.core.errors import Conflict, StoreError
from tandem.core.learning import AdapterRecord, VersionRecord
from tandem.core.version import AdapterVersion
from tandem.services import tasks
from tandem.services.answering.models import Models
from tandem.services.learning import loaded
from tandem.services.learning.publish import POINTS
from tandem.services.versions.adapters import Adapters
from tandem.services.versions.service import Versions
from tandem.store import adapters, events


def started_with(path: Path, number: int = 1) -> FakeEngine:
    """An engine into which the files at `path` were loaded as `formal`, so many times."""
    loaded = AdapterVersion("formal", number, inspect_adapter(path).content_hash, str(path))
    return FakeEngine(adapters={"formal": loaded})


@asynccontextmanager
async def served(
    directory: Path, engine: FakeEngine, **options: object
) -> AsyncIterator[tuple[World, Versions]]:
    directory.mkdir(exist_ok=True)
    async with world(directory, engine=engine, **options) as made:
        loading = Adapters(engine, (str(directory.parent),), {})
        yield made, Versions(made.tools, made.learner, Models(engine, "demo", 0), loading)


async def known(made: World) -> list[VersionRecord]:
    return await made.store.read(adapters.versions, "formal")


async def learn(made: World, number: int) -> None:
    """Feedback, until version `number` answers."""
    await made.give([made.sample() for _ in range(4)])
    made.learner.notify("formal")

    def answers() -> bool:
        loaded = made.engine.adapters.get("formal")
        return loaded is not None and loaded.label == f"formal@{number}"

    await until(answers)
    await until(lambda: not any(name.startswith("~candidate") for name in made.engine.adapters))


@pytest.mark.parametrize("loads", [1, 3])
async def test_it_becomes_a_version_from_which_learning_goes_on(tmp_path: Path, loads: int) -> None:
    content = files_at(tmp_path / "hand", "by hand")
    engine = started_with(tmp_path / "hand", loads)
    async with served(tmp_path / "store", engine) as (made, versions):
        await learn(made, loads + 1)
        first, second = await known(made)
        assert (first.number, first.parent, first.origin) == (loads, 0, "import")
        assert first.content_hash == content != second.content_hash
        assert second.parent == loads
        assert engine.spec_of["learn/formal"].source == first.path
        # One label, one content: what answered before keeps its own.
        assert {v.content_hash for v in engine.published if v.number == loads} == {content}
        assert await versions.roll_back("formal", None) == loads
        assert engine.adapters["formal"].content_hash == content
        await learn(made, loads + 2)
        assert (await known(made))[-1].parent == loads


async def test_settings_or_an_import_find_it_as_a_version(tmp_path: Path) -> None:
    content = files_at(tmp_path / "hand", "by hand")
    files_at(tmp_path / "other", "from elsewhere")
    engine = started_with(tmp_path / "hand")
    async with served(tmp_path / "store", engine) as (_, versions):
        imported = await versions.imports.directory("formal", "other")
        assert imported.number == 2
        assert engine.adapters["formal"].content_hash == imported.content_hash != content
    engine = started_with(tmp_path / "hand")
    async with served(tmp_path / "another", engine) as (_, versions):
        assert (await versions.create("formal", {"gate": "manual"})).record.current == 1
        with pytest.raises(Conflict, match="answers"):
            await versions.delete_version("formal", 1)


@pytest.mark.parametrize("flag", ["same files", "changed files", "no files"])
@pytest.mark.parametrize("back_to", [2, 1, 0])
async def test_a_restart_changes_nothing(
    tmp_path: Path, flag: str, back_to: int, caplog: pytest.LogCaptureFixture
) -> None:
    files_at(tmp_path / "hand", "by hand")
    async with served(tmp_path / "store", started_with(tmp_path / "hand")) as (made, versions):
        await learn(made, 2)
        if back_to != 2:
            assert await versions.roll_back("formal", back_to) == back_to
        before, answered = await known(made), made.engine.adapters.get("formal")
        assert (answered.label if answered else None) == (f"formal@{back_to}" if back_to else None)
    if flag == "changed files":
        files_at(tmp_path / "hand", "something else")
    again = FakeEngine() if flag == "no files" else started_with(tmp_path / "hand")
    shutil.rmtree(tmp_path / "hand")
    async with served(tmp_path / "store", again) as (made, _):
        assert again.adapters.get("formal") == answered
        assert await known(made) == before
        warned = [record.message for record in caplog.records if "is not served" in record.message]
        assert len(warned) == (flag == "changed files")
        made.numbers = itertools.count(100)  # other feedback than before
        await learn(made, 3)  # goes on from what answers
        assert (await known(made))[-1].parent == back_to


@pytest.mark.parametrize("back_to", [None, 0])
async def test_before_anything_was_learned_there_is_the_base_to_go_back_to(
    tmp_path: Path, back_to: int | None
) -> None:
    content = files_at(tmp_path / "hand", "by hand")
    async with served(tmp_path / "store", started_with(tmp_path / "hand")) as (made, versions):
        await versions.create("formal", {})
        assert made.engine.adapters["formal"].label == "formal@1"
        assert await versions.roll_back("formal", back_to) == 0
        assert "formal" not in made.engine.adapters
        with pytest.raises(Conflict, match="no version to roll back"):
            await versions.roll_back("formal", None)
    again = started_with(tmp_path / "hand")
    async with served(tmp_path / "store", again) as (made, versions):
        assert "formal" not in again.adapters  # rolled back, flag or not
        assert (await versions.publish("formal", 1)).content_hash == content
        assert again.adapters["formal"].label == "formal@1"


async def test_what_the_store_knew_without_a_version_gets_one_at_the_start(tmp_path: Path) -> None:
    content = files_at(tmp_path / "hand", "by hand")
    async with served(tmp_path / "store", FakeEngine()) as (made, versions):
        await versions.create("formal", {"gate": "manual"})
        await made.give([made.sample() for _ in range(4)], {"gate": "manual"})
        made.learner.notify("formal")
        async with asyncio.timeout(PATIENCE_S):
            while not await known(made):
                await asyncio.sleep(0.02)
        await versions.refuse("formal", 1)
    again = started_with(tmp_path / "hand")
    async with served(tmp_path / "store", again) as (made, _):
        refused, kept = await known(made)
        assert (refused.number, kept.number, kept.content_hash) == (1, 2, content)
        assert again.adapters["formal"].label == "formal@2"  # number 1 is a refused one's


async def test_an_adapter_that_was_deleted_gets_new_numbers(tmp_path: Path) -> None:
    files_at(tmp_path / "hand", "by hand")
    async with served(tmp_path / "store", started_with(tmp_path / "hand")) as (made, versions):
        await learn(made, 2)
        await versions.delete("formal")
        assert "formal" not in made.engine.adapters
    again = started_with(tmp_path / "hand")
    async with served(tmp_path / "store", again) as (made, versions):
        assert again.adapters["formal"].label == "formal@1" and await known(made) == []
        await versions.create("formal", {})
        assert again.adapters["formal"].label == "formal@3"


@pytest.mark.parametrize("how", ["changed", "gone"])
async def test_files_that_are_others_now_are_no_version(tmp_path: Path, how: str) -> None:
    files_at(tmp_path / "hand", "by hand")
    files_at(tmp_path / "new", "to import")
    engine = started_with(tmp_path / "hand")
    if how == "changed":
        files_at(tmp_path / "hand", "something else")
    else:
        shutil.rmtree(tmp_path / "hand")
    async with served(tmp_path / "store", engine) as (made, versions):
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")

        async def told() -> list[str]:
            return [event.message for event in await made.store.read(events.listed, "formal")]

        async with asyncio.timeout(PATIENCE_S):
            while not any("learning failed" in message for message in await told()):
                await asyncio.sleep(0.02)
        assert all("cannot be saved as a version" in message for message in await told())
        assert not any(str(tmp_path) in message for message in await told())
        assert await known(made) == [] and engine.steps == []  # nothing begins at the base
        assert engine.adapters["formal"].label == "formal@1"
        assert not list((tmp_path / "store/adapters/formal").iterdir())
        imported = await versions.imports.directory("formal", "new")
        assert imported.number == 2  # `formal@1` has been something else


async def test_a_disk_that_refuses_is_not_asked_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "FIRST_S", 0.01)
    files_at(tmp_path / "hand", "by hand")
    whole, copies = loaded.copy, []

    def full(source: Path, target: Path) -> None:
        copies.append(target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loaded, "copy", full)
    async with served(tmp_path / "store", started_with(tmp_path / "hand")) as (made, versions):
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: bool(copies))
        await until(lambda: made.store.read(events.listed, "formal"))
        await asyncio.sleep(0.2)
        assert len(copies) == 1
        told = [event.message for event in await made.store.read(events.listed, "formal")]
        assert [("No space left" in line, "will retry" in line) for line in told] == [(True, True)]
        monkeypatch.setattr(loaded, "copy", whole)
        await versions.create("formal", {})  # whoever asks for it need not wait
        await until(lambda: made.engine.adapters["formal"].number == 3)  # `formal@1` was given up
        assert [(v.number, v.origin) for v in await known(made)] == [(2, "import"), (3, "feedback")]


async def test_what_cannot_be_kept_is_tried_after_longer_and_longer_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_at(tmp_path / "hand", "by hand")
    now_s, copies = [0.0], []

    def full(source: Path, target: Path) -> None:
        copies.append(now_s[0])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loaded, "copy", full)
    monkeypatch.setattr(loaded, "_LONGEST_S", 180.0)
    async with served(tmp_path / "store", started_with(tmp_path / "hand")) as (made, _):
        keeper = loaded.Keeper("formal", replace(made.tools, now=lambda: now_s[0]))
        for now_s[0] in (0.0, 59.0, 60.0, 179.0, 180.0, 359.0, 360.0, 5.0):  # it is set back
            with pytest.raises(StoreError, match="cannot be saved"):
                await keeper.keep()
        assert copies == [0.0, 60.0, 180.0, 360.0, 5.0]


@pytest.mark.parametrize("point", POINTS)
async def test_a_failure_on_the_way_leaves_nothing_half(tmp_path: Path, point: str) -> None:
    content = files_at(tmp_path / "hand", "by hand")
    fails = iter([True])

    def at(reached: str) -> None:
        if reached == point and next(fails, False):
            raise RuntimeError(point)

    async with served(tmp_path / "store", started_with(tmp_path / "hand"), at=at) as (made, _):
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        async with asyncio.timeout(PATIENCE_S):
            while len(found := await known(made)) < 2:
                await asyncio.sleep(0.02)
        kept, learned = found
        assert (kept.content_hash, kept.origin) == (content, "import")
        assert learned.parent == kept.number and learned.origin == "feedback"
        await until(lambda: made.engine.adapters["formal"].number == learned.number)
    again = started_with(tmp_path / "hand")
    async with served(tmp_path / "store", again) as (made, _):
        assert await known(made) == found and again.adapters["formal"].number == learned.number
        on_disk = {str(path) for path in (tmp_path / "store/adapters/formal").iterdir()}
        assert on_disk == {version.path for version in found}


async def test_an_adapter_that_is_only_served_is_left_alone(tmp_path: Path) -> None:
    files_at(tmp_path / "hand", "by hand")
    async with served(tmp_path / "store", started_with(tmp_path / "hand")) as (made, _):
        await made.store.write(adapters.create, AdapterRecord("casual", 0.0))
        await made.give([made.sample(adapter="casual") for _ in range(4)])
        made.learner.notify("casual")
        await until(lambda: "casual" in made.engine.adapters)
        assert await known(made) == []
        assert await made.store.read(adapters.find, "formal") is None
