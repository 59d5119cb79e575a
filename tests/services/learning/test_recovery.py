"""What a killed process leaves: everything acknowledged is used once, nothing half is served."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import pytest

from fake_engine import INFO, FakeEngine
from learning_child import learn_and_die
from learning_world import World, world
from patience import PATIENCE_S, START_S
from tandem.core.errors import OutOfMemory
from tandem.core.learning import SampleState, Split, VersionState
from tandem.core.version import AdapterVersion
from tandem.services.files import Files
from tandem.services.learning.publish import POINTS
from tandem.services.learning.recovery import Reconciler, recover
from tandem.store import adapters, events, files, samples

# Children begin with everything imported, and without this process's threads.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["learning_child"])


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    """The server of processes looks for what it is to load on its own path, and says nothing where
    that is not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


def die_at(directory: Path, point: str, nth: int) -> None:
    """Let a process learn in `directory` until it ends itself there."""
    child = PROCESSES.Process(target=learn_and_die, args=(directory, point, nth))
    child.start()
    child.join(timeout=START_S)
    code = child.exitcode
    child.kill()
    assert code == 9, f"it did not reach {point} {nth} times"


async def all_used(made: World) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            states = (await made.store.read(samples.counts))["formal"][Split.TRAIN]
            if states == {SampleState.CONSUMED: 10}:
                return
            await asyncio.sleep(0.02)


async def answers_as(engine: FakeEngine, number: int) -> None:
    """Wait for a version to be adopted, which comes after the commit that used its samples."""
    async with asyncio.timeout(PATIENCE_S):
        while "formal" not in engine.adapters or engine.adapters["formal"].number != number:
            await asyncio.sleep(0.02)
    assert engine.published[-1].number == number


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("accepted", 1),
        ("step", 1),
        ("step", 2),
        *((point, 1) for point in POINTS),
        ("after rename", 2),
        ("after commit", 2),
    ],
)
async def test_a_kill_at_any_point_loses_and_repeats_nothing(
    tmp_path: Path, point: str, nth: int
) -> None:
    die_at(tmp_path, point, nth)
    engine = FakeEngine()
    async with world(tmp_path, engine=engine) as made:
        committed = await made.store.read(adapters.versions, "formal")
        # What the database says is what answers, from the first moment on.
        if committed:
            assert engine.published[0].content_hash == committed[-1].content_hash
        await all_used(made)
        versions = await made.store.read(adapters.versions, "formal")
        await answers_as(engine, versions[-1].number)
        assert [version.state for version in versions] == [VersionState.PUBLISHED] * len(versions)
        assert versions[: len(committed)] == committed
        assert len({version.number for version in versions}) == len(versions)
        assert sum(version.metrics["samples"] for version in versions) == 10
        on_disk = {str(path) for path in (tmp_path / "adapters" / "formal").iterdir()}
        assert on_disk == {version.path for version in versions}
        held_out = await made.store.read(samples.held_out, "formal")
        assert len(held_out) == 2


async def first_version(made: World) -> None:
    """Feedback, and the version that is made of it answers."""
    await made.give([made.sample() for _ in range(4)])
    made.learner.notify("formal")
    async with asyncio.timeout(PATIENCE_S):
        while "formal" not in made.engine.adapters:
            await asyncio.sleep(0.02)


async def test_a_version_whose_files_are_gone_is_told_and_stops_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await first_version(made)
        version = await made.store.read(adapters.version, "formal", 1)
        assert version is not None
        await made.store.write(
            adapters.save_version,
            replace(version, path=str(tmp_path / "broken")),
        )
        found = await recover(made.tools, tmp_path)
        assert found.lost == ("formal@1",)
        [event, *_] = await made.store.read(events.listed, "formal")
        assert event.level == "error" and "cannot be loaded: the store/broken has" in event.message
        assert str(tmp_path) not in event.message


async def test_a_version_without_memory_now_does_not_stop_the_start(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await first_version(made)
        await made.engine.unload_adapter("formal")

        async def full(version: AdapterVersion) -> AdapterVersion:
            raise OutOfMemory("there is no memory for it now")

        made.engine.publish_adapter = full  # type: ignore[method-assign]
        assert (await recover(made.tools, tmp_path)).lost == ("formal@1",)
        del made.engine.publish_adapter
        await Reconciler(made.tools, made.learner).look()
        assert made.engine.adapters["formal"].number == 1


async def test_a_directory_that_was_moved_serves_its_versions_and_files(tmp_path: Path) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"bytes"

    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    async with world(old) as made:
        await made.give([made.sample() for _ in range(10)])
        made.learner.notify("formal")
        await all_used(made)
        numbers = {version.number for version in await made.store.read(adapters.versions)}
        await answers_as(made.engine, max(numbers))
        uploaded = Files(made.store, old / "files", 1000, time.time)
        file = await uploaded.create("name", "batch", "", parts())
    old.rename(new)
    engine = FakeEngine()
    async with world(new, engine=engine) as made:
        assert await Files(made.store, new / "files", 1000, time.time).start() == 0
        await answers_as(engine, max(numbers))
        assert engine.adapters["formal"].path == str(new / "adapters/formal" / str(max(numbers)))
        on_disk = {int(path.name) for path in (new / "adapters/formal").iterdir()}
        assert on_disk == numbers
        kept = await made.store.read(files.find, file.file_id)
        assert kept is not None and Path(kept.path).read_bytes() == b"bytes"
        assert kept.path.startswith(str(new))


async def test_another_base_model_is_told_once_and_has_scores_of_its_own(tmp_path: Path) -> None:
    def engine(weights: str) -> FakeEngine:
        return FakeEngine(info=replace(INFO, weights_hash=weights))

    async with world(tmp_path, engine=engine("old")) as made:
        await made.give([made.sample() for _ in range(10)])
        made.learner.notify("formal")
        await all_used(made)
        old = made.tools.references.base
        told = len(await made.store.read(events.listed, "formal"))
    for start, expected in (("old", 0), ("new", 1), ("new", 1)):
        async with world(tmp_path, engine=engine(start)) as made:
            news = await made.store.read(events.listed, "formal")
            assert len(news) - told == expected
            assert (made.tools.references.base == old) == (start == "old")
    assert news[0].level == "warning" and "weights are others" in news[0].message
    assert news[0].data == {"before": "old", "now": "new"}
