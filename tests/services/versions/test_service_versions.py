"""Versions over the scripted engine: decisions at the same time, and what stays on disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from learning_world import World, world
from patience import PATIENCE_S, until
from tandem.core.batches import BatchRecord, BatchStatus
from tandem.core.errors import Conflict, NotFound, StoreError
from tandem.core.learning import EventRecord, SampleState, VersionRecord, VersionState
from tandem.core.training import ScoreRequest
from tandem.core.version import AdapterVersion
from tandem.services.answering.models import Models
from tandem.services.learning.publish import NoRoom
from tandem.services.learning.recovery import recover
from tandem.services.versions.adapters import Adapters
from tandem.services.versions.service import Versions
from tandem.store import adapters, batches, samples


@asynccontextmanager
async def versions_over(
    directory: Path, **options: object
) -> AsyncIterator[tuple[World, Versions]]:
    async with world(directory, **options) as made:
        models = Models(made.engine, "demo", 0)
        yield made, Versions(made.tools, made.learner, models, Adapters(made.engine, (), {}))


async def learned(made: World, number: int, gate: str = "auto") -> VersionRecord:
    """Feedback, and the version that is made of it."""
    await made.give([made.sample() for _ in range(4)], {"gate": gate})
    made.learner.notify("formal")
    async with asyncio.timeout(PATIENCE_S):
        while (found := await made.store.read(adapters.version, "formal", number)) is None:
            await asyncio.sleep(0.02)
    await until(lambda: not any(name.startswith("~candidate") for name in made.engine.adapters))
    return found


def optimisers(made: World) -> list[str]:
    """Versions whose optimiser state is on disk."""
    found = (made.directory / "adapters" / "formal").glob("*/trainer_state.json")
    return sorted(path.parent.name for path in found)


async def test_what_is_published_meanwhile_is_not_refused(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1, "manual")
        async with made.learner.held("formal"):  # both have looked before either decides
            publishing = asyncio.create_task(versions.publish("formal", 1))
            await asyncio.sleep(0.1)
            refusing = asyncio.create_task(versions.refuse("formal", 1))
            await asyncio.sleep(0.1)
        assert (await publishing).state is VersionState.PUBLISHED
        with pytest.raises(Conflict, match="published already"):
            await refusing
        [kept] = await versions.versions("formal")
        assert kept.state is VersionState.PUBLISHED
        assert (await versions.find("formal")).record.current == 1


async def test_the_shape_may_change_again_when_no_version_has_it(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1)
        with pytest.raises(Conflict, match="has versions"):
            await versions.create("formal", {"rank": 4})
        await versions.delete("formal")
        for _ in range(2):  # numbers go on where they ended
            view = await versions.create("formal", {"rank": 4})
            assert view.record.next_number == 2 and view.settings.rank == 4
        again = await learned(made, 2)
        assert again.state is VersionState.PUBLISHED


async def test_two_steps_back_at_once_are_two_steps(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        for number in (1, 2):
            await learned(made, number)
        both = await asyncio.gather(*(versions.roll_back("formal", None) for _ in range(2)))
        assert sorted(both) == [0, 1] and "formal" not in made.engine.adapters


async def test_a_version_that_is_published_meanwhile_does_not_keep_the_one_that_is_left(
    tmp_path: Path,
) -> None:
    async with versions_over(tmp_path) as (made, versions):
        for number in (1, 2):
            await learned(made, number)
        async with made.learner.held("formal"):
            leaving = asyncio.create_task(versions.roll_back("formal", None))
            await asyncio.sleep(0.1)
            record = await made.store.read(adapters.version, "formal", 2)
            assert record is not None
            child = replace(record, number=3, parent=2, state=VersionState.CANDIDATE)
            await made.store.write(adapters.save_version, child)
            event = EventRecord("formal", 0.0, "info", "published", {})
            await made.store.write(adapters.publish, child, consumed=(), event=event)
        assert await leaving == 1


async def test_old_versions_keep_no_optimiser_state(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        for number in (1, 2, 3):
            await learned(made, number)
        await until(lambda: optimisers(made) == ["2", "3"])
        assert (tmp_path / "adapters/formal/1/adapter_model.safetensors").is_file()
        assert await versions.roll_back("formal", 2) == 2
        await recover(made.tools, tmp_path)
        assert optimisers(made) == ["2"]


async def test_a_candidate_keeps_its_optimiser_state_until_the_decision(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1, "manual")
        await recover(made.tools, tmp_path)
        assert optimisers(made) == ["1"]
        await versions.refuse("formal", 1)
        assert optimisers(made) == []


async def test_one_version_is_deleted(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        for number in (1, 2):
            await learned(made, number)
        with pytest.raises(Conflict, match="answers"):
            await versions.delete_version("formal", 2)
        await versions.delete_version("formal", 1)
        assert not (tmp_path / "adapters/formal/1").exists()
        assert [version.number for version in await versions.versions("formal")] == [2]
        with pytest.raises(NotFound):
            await versions.delete_version("formal", 1)
        assert await versions.roll_back("formal", None) == 0  # what version 1 was made from
        await versions.publish("formal", 2)
        await learned(made, 3)


async def test_what_was_refused_and_is_published_by_request_is_replayed(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1, "manual")
        await versions.refuse("formal", 1)
        await made.give([made.sample()], {"gate": "manual"})
        await learned(made, 2, "manual")
        await versions.refuse("formal", 2)

        async def consumed() -> list[int | None]:
            found = await made.store.read(samples.heads, "formal", SampleState.CONSUMED)
            return [head.version for head in found]

        assert await consumed() == []
        await versions.publish("formal", 1)
        assert await consumed() == [1] * 4  # and nothing of version 2
        await versions.publish("formal", 1)  # pins it; nothing else changes
        assert await consumed() == [1] * 4


async def test_an_import_is_rolled_back_to_what_it_took_the_place_of(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        for number in (1, 2):
            await learned(made, number)
        imported = await versions.imports.archive(
            "formal", await versions.archive("formal", 1), 1 << 20
        )
        assert (imported.number, imported.parent) == (3, 2)
        assert optimisers(made) == ["2"]  # training may go on from there
        assert await versions.roll_back("formal", None) == 2
        assert made.engine.adapters["formal"].number == 2
        assert await versions.roll_back("formal", None) == 1
        other = await versions.imports.archive(
            "other", await versions.archive("formal", 1), 1 << 20
        )
        assert other.parent == 0 and await versions.roll_back("other", None) == 0


async def test_an_import_that_loses_its_place_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    async with versions_over(tmp_path, max_adapters=2) as (made, versions):
        await learned(made, 1)
        archive, score = await versions.archive("formal", 1), made.engine.score_as

        def somebody_else_comes(request: ScoreRequest, under: str | None) -> float:
            made.engine.adapters["third"] = AdapterVersion("third", 1, "hash", "elsewhere")
            return score(request, under)

        made.engine.score_as = somebody_else_comes
        with pytest.raises(NoRoom):
            await versions.imports.archive("other", archive, 1 << 20)
        assert sorted(made.engine.adapters) == ["formal", "third"]
        assert await made.store.read(adapters.find, "other") is None
        assert list((made.directory / "adapters" / "other").iterdir()) == []


async def test_an_import_that_the_store_does_not_take_leaves_no_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1)
        archive = await versions.archive("formal", 1)

        async def lost(_: object) -> None:
            raise StoreError("the connection is gone")

        monkeypatch.setattr(made.tools.publisher, "publish", lost)
        with pytest.raises(StoreError):
            await versions.imports.archive("other", archive, 1 << 20)
        assert sorted(made.engine.adapters) == ["formal"]


async def test_a_reference_and_a_candidate_are_not_deleted(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        for number in (1, 2):
            await learned(made, number)
        await versions.create("formal", {"reference": "version:1", "gate": "manual"})
        with pytest.raises(Conflict, match="reference"):
            await versions.delete_version("formal", 1)
        await learned(made, 3, "manual")
        with pytest.raises(Conflict, match="waits for a decision"):
            await versions.delete_version("formal", 3)


async def test_a_name_that_is_made_again_has_new_numbers(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1)
        await versions.delete("formal")
        await made.learner.count()
        shown = generate_latest(made.registry).decode().splitlines()
        gauges = ("tandem_learning_samples{", "tandem_learning_version{", "tandem_learning_loss{")
        assert [line for line in shown if line.startswith(gauges)] == []
        await learned(made, 2)
        assert made.engine.adapters["formal"].number == 2


async def test_only_the_newest_versions_and_those_that_are_needed_stay(tmp_path: Path) -> None:
    async with versions_over(tmp_path, keep_versions=2) as (made, versions):
        folder = tmp_path / "adapters" / "formal"
        for number in (1, 2, 3, 4):
            await learned(made, number)
        await until(lambda: sorted(path.name for path in folder.iterdir()) == ["3", "4"])
        kept = await versions.versions("formal")
        assert [(each.number, each.parent) for each in kept] == [(4, 3), (3, 0)]
        said = (await versions.events("formal", None, 50))[0]
        assert said.message.startswith("the newest 2 versions are kept") and "2" in said.message
        # What version 2 has learned, version 3 has learned through it: erasure finds it.
        assert len(await made.store.read(adapters.trained_on, "formal", 3)) == 12

        await versions.roll_back("formal", 3)
        await versions.create("formal", {"gate": "manual"})
        for number in (5, 6):
            await learned(made, number)
            await versions.refuse("formal", number)
        # The current version stays, however old it is; version 4 was no ancestor of it.
        await until(lambda: sorted(path.name for path in folder.iterdir()) == ["3", "5", "6"])


async def test_a_reference_stays_however_old(tmp_path: Path) -> None:
    async with versions_over(tmp_path, keep_versions=1) as (made, versions):
        await learned(made, 1)
        await versions.create("formal", {"reference": "version:1"})
        for number in (2, 3, 4):
            await learned(made, number)
        folder = tmp_path / "adapters" / "formal"
        # The last one's parent stays for the way back.
        await until(lambda: sorted(path.name for path in folder.iterdir()) == ["1", "3", "4"])


async def test_an_adapter_that_answers_a_batch_is_not_deleted(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1)
        batch = BatchRecord(
            "batch_1", 0.0, "", "/v1/completions", "file-1", "24h", 1.0, adapter="formal",
            status=BatchStatus.IN_PROGRESS,
        )  # fmt: skip
        await made.store.write(batches.add, batch)
        with pytest.raises(Conflict, match="'formal' answers batch_1; cancel that batch"):
            await versions.delete("formal")
        ended = replace(batch, status=BatchStatus.CANCELLED)
        assert await made.store.write(batches.update, ended, (batch.status,))
        await versions.delete("formal")


async def test_samples_of_a_candidate_that_waited_are_free_once_the_adapter_is_deleted(
    tmp_path: Path,
) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1, "manual")
        used = await made.store.read(adapters.trained_on, "formal", 1)
        await versions.delete("formal")
        found = await made.store.read(samples.get, used)
        assert {sample.state for sample in found} == {SampleState.ACCEPTED}
