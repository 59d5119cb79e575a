"""Checkpoints of jobs over the scripted engine: who finds them, and how many are loaded."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from tandem.core.errors import EngineDead, NotFound, Overloaded
from tandem.core.learning import CheckpointRecord, JobRecord, JobStatus
from tandem.core.version import AdapterVersion
from tandem.services.versions.checkpoints import (
    PLACES,
    Checkpoints,
    checkpoint_label,
    labelled_adapter,
)
from tandem.store import Store, jobs

TENANT = "owner"


class Gated(FakeEngine):
    """Loads while `may_load` is set, which it is at first; `loading` tells that it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.loading = asyncio.Event()
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def publish_adapter(self, version: AdapterVersion) -> AdapterVersion:
        """As the fake does, later."""
        self.loading.set()
        await self.may_load.wait()
        return await super().publish_adapter(version)


class Stage:
    """Checkpoints of kept jobs over a fake engine."""

    def __init__(self, directory: Path) -> None:
        self.store = Store.open(directory)
        self.engine = Gated()
        self.checkpoints = Checkpoints(self.engine, self.store)

    async def keep(
        self, number: int, steps: int = 1, tenant: str = TENANT, folder: str = "files"
    ) -> list[str]:
        """A job that trained `formal`, and the names of its checkpoints."""
        job_id = f"ftjob-{number:024x}"
        job = JobRecord(
            job_id, 1.0, tenant, "demo", "formal", JobStatus.SUCCEEDED, {"type": "dpo"}, "file-1"
        )
        await self.store.write(jobs.add, job)
        for step in range(1, steps + 1):
            path = self.store.directory / "jobs" / job_id / str(step) / folder
            path.mkdir(parents=True)
            name = f"ckpt-{number}-{step}"
            record = CheckpointRecord(name, job_id, 1.0, step, str(path), f"hash-{name}")
            await self.store.write(jobs.add_checkpoint, record)
        return [checkpoint_label("formal", job_id, step) for step in range(1, steps + 1)]

    async def versions(self, count: int, number: int = 1) -> list[AdapterVersion]:
        """So many checkpoints of one job, found."""
        found = [
            await self.checkpoints.find(label, TENANT) for label in await self.keep(number, count)
        ]
        assert all(found)
        return [version for version in found if version is not None]

    async def ask(self, version: AdapterVersion) -> None:
        async with self.checkpoints.held(version):
            assert self.engine.adapters[version.name] == version

    def loaded(self, versions: list[AdapterVersion]) -> list[int]:
        """Which of these the engine has."""
        assert len(self.engine.adapters) <= PLACES
        return [place for place, each in enumerate(versions) if each.name in self.engine.adapters]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.store.close()


async def test_only_the_tenant_of_a_job_finds_its_checkpoints(stage: Stage) -> None:
    first, second = await stage.keep(1, steps=2)
    [other] = await stage.keep(2)
    await stage.keep(3, tenant="somebody else")
    assert len({first, second, other}) == 3
    found = {label: await stage.checkpoints.find(label, TENANT) for label in (first, second, other)}
    versions = [version for version in found.values() if version is not None]
    assert [version.content_hash for version in versions] == [
        "hash-ckpt-1-1",
        "hash-ckpt-1-2",
        "hash-ckpt-2-1",
    ]
    assert all(version.internal for version in versions)
    assert await stage.checkpoints.find(first, "somebody else") is None
    shutil.rmtree(versions[0].path)
    assert await stage.checkpoints.find(first, TENANT) is None


@pytest.mark.parametrize(
    "label",
    [
        "formal",
        "formal:00000001",
        "formal:00000001:ckpt-step-0",
        "formal:00000001:ckpt-step-01",
        "formal:00000001:ckpt-step-9",
        f"formal:00000001:ckpt-step-{10**30}",
        "formal:%:ckpt-step-1",
        "formal:00000001:ckpt-step-1\n",
        "for\0mal:00000001:ckpt-step-1",
        "casual:00000001:ckpt-step-1",
    ],
)
async def test_what_is_no_checkpoint_is_not_found(stage: Stage, label: str) -> None:
    assert await stage.keep(1) == ["formal:00000001:ckpt-step-1"]
    assert await stage.checkpoints.find(label, TENANT) is None


def test_a_label_names_its_adapter() -> None:
    assert labelled_adapter(checkpoint_label("my.style", f"ftjob-{'a' * 24}", 40)) == "my.style"
    assert labelled_adapter("formal") is None


async def test_those_who_ask_at_the_same_time_have_it_loaded_once(stage: Stage) -> None:
    [version] = await stage.versions(1)
    stage.engine.may_load.clear()
    asking = [asyncio.create_task(stage.ask(version)) for _ in range(3)]
    await stage.engine.loading.wait()
    stage.engine.may_load.set()
    await asyncio.gather(*asking)
    await stage.ask(version)
    assert stage.engine.published == [version]


async def test_who_was_not_asked_for_longest_makes_room(stage: Stage) -> None:
    versions = await stage.versions(PLACES + 1)
    for version in (*versions[:PLACES], versions[0], versions[PLACES]):
        await stage.ask(version)
    assert stage.loaded(versions) == [0, *range(2, PLACES + 1)]


async def test_nothing_is_taken_from_an_answer(stage: Stage) -> None:
    versions = await stage.versions(PLACES + 1)
    async with AsyncExitStack() as answers:
        for version in versions[1:PLACES]:
            await answers.enter_async_context(stage.checkpoints.held(version))
        async with stage.checkpoints.held(versions[0]):
            with pytest.raises(Overloaded, match="try again"):
                await stage.ask(versions[PLACES])
            await stage.ask(versions[0])  # once more, while it answers
            with pytest.raises(Overloaded):
                await stage.ask(versions[PLACES])
            assert stage.loaded(versions) == list(range(PLACES))
        await stage.ask(versions[PLACES])
        assert stage.loaded(versions) == list(range(1, PLACES + 1))


async def test_who_leaves_during_a_load_takes_no_place(stage: Stage) -> None:
    versions = await stage.versions(PLACES + 1)
    stage.engine.may_load.clear()
    leaving = asyncio.create_task(stage.ask(versions[0]))
    waiting = asyncio.create_task(stage.ask(versions[1]))
    await stage.engine.loading.wait()
    for task in (leaving, waiting):
        task.cancel()
    stage.engine.may_load.set()
    await asyncio.wait((leaving, waiting))
    assert leaving.cancelled() and waiting.cancelled()
    assert stage.loaded(versions) == [0]
    async with AsyncExitStack() as answers:
        for version in versions[1:]:
            await answers.enter_async_context(stage.checkpoints.held(version))
        assert stage.loaded(versions) == list(range(1, PLACES + 1))


async def test_files_that_cannot_be_loaded_take_no_place(stage: Stage) -> None:
    [label] = await stage.keep(9, folder="broken")
    broken = await stage.checkpoints.find(label, TENANT)
    assert broken is not None
    with pytest.raises(NotFound) as refused:
        await stage.ask(broken)
    assert refused.value.code == "model_not_found" and broken.path not in str(refused.value)
    versions = await stage.versions(PLACES)
    async with AsyncExitStack() as answers:
        for version in versions:
            await answers.enter_async_context(stage.checkpoints.held(version))
        assert stage.loaded(versions) == list(range(PLACES))


async def test_it_is_loaded_again_after_the_engines_death(stage: Stage) -> None:
    versions = await stage.versions(PLACES + 1)
    stage.engine.die()
    with pytest.raises(EngineDead):
        await stage.ask(versions[0])
    await stage.engine.start()
    for version in versions[:PLACES]:
        await stage.ask(version)
    stage.engine.adapters.clear()  # what an engine cannot load again, it has no more
    for version in (versions[PLACES], *versions[:PLACES]):
        await stage.ask(version)
    assert stage.loaded(versions) == list(range(PLACES))
