"""Which version of an adapter answers the lines of a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from batch_stage import Stage

from patience import until
from tandem.core.batches import BatchError, BatchStatus
from tandem.core.errors import AdapterError
from tandem.core.learning import AdapterRecord, VersionRecord, VersionState
from tandem.core.version import AdapterVersion
from tandem.services.answering.models import Pin, ServedModel, pinned_to
from tandem.services.batches.reply import Reply
from tandem.store import Store, adapters
from tandem.store import batches as rows


async def formal(stage: Stage) -> AdapterVersion:
    """Version 1 of an adapter that learns."""
    path = str(stage.store.directory / "adapters/formal/1")
    version = VersionRecord("formal", 1, "hash", path, 0.0, VersionState.PUBLISHED)
    await stage.store.write(adapters.create, AdapterRecord("formal", 0.0, settings={}))
    await stage.store.write(adapters.allocate, "formal")
    await stage.store.write(adapters.publish, version)
    return await stage.engine.publish_adapter(AdapterVersion("formal", 1, "hash", path))


@pytest.mark.parametrize("newest", [False, True])
async def test_one_version_answers_all_lines_unless_the_newest_is_asked_for(
    store: Store, newest: bool
) -> None:
    stage = Stage(store)
    await formal(stage)
    batch = await stage.ended(await stage.make(3, "demo:formal", newest=newest))
    assert batch.status is BatchStatus.COMPLETED and batch.adapter == "formal"
    pins = {pinned for _, pinned in stage.answered}
    if newest:
        assert batch.version is None and pins == {None}
    else:
        [pin] = pins
        assert pin is not None and pin.version is not None
        assert (pin.version.number, pin.version.content_hash) == (1, "hash")
        assert batch.version == 1 and pin.version.internal
    assert not any(name.startswith("~batch") for name in stage.engine.adapters)


async def test_the_base_answers_all_lines_of_an_adapter_without_versions(store: Store) -> None:
    stage = Stage(store)
    await store.write(adapters.create, AdapterRecord("formal", 0.0, settings={}))
    stage.tools.models.announce("formal")
    batch = await stage.ended(await stage.make(2, "demo:formal"))
    assert (batch.status, batch.version) == (BatchStatus.COMPLETED, 0)
    assert {pin for _, pin in stage.answered} == {Pin(None)}
    served = ServedModel("demo:formal", "demo", AdapterVersion("formal", 1, "", ""), 64, "formal")
    assert pinned_to(served, Pin(None)).adapter is None


async def test_the_version_of_a_batch_stays_and_is_loaded_again(store: Store) -> None:
    """A 404 for the pinned version is no answer: it is loaded, and the line tried again."""
    stage, said = Stage(store), list[str]()
    await formal(stage)

    def answer(prompt: str) -> Reply:
        said.append(prompt)
        return Reply(404 if said.count(prompt) == 1 else 200, {})

    stage.answer = answer
    stage.wait.clear()
    made = await stage.make(3, "demo:formal")
    await until(lambda: stage.at_once == 3)
    assert await store.read(rows.pinned, "formal") == {1: made.batch_id}
    stage.wait.set()
    batch = await stage.ended(made)
    assert (batch.completed, batch.failed) == (3, 0) and len(said) == 6
    assert await store.read(rows.pinned, "formal") == {}


async def test_what_is_loaded_by_hand_answers_although_the_adapter_has_no_version(
    store: Store,
) -> None:
    """Its record may be there before its files could be copied."""
    stage = Stage(store)
    await store.write(adapters.create, AdapterRecord("formal", 0.0, settings={}))
    await stage.engine.load_adapter("formal", "/formal")
    batch = await stage.ended(await stage.make(2, "demo:formal"))
    assert (batch.completed, batch.version) == (2, None)
    assert {pin for _, pin in stage.answered} == {None}


async def test_a_batch_whose_version_is_lost_fails_and_has_a_result_for_each_line(
    store: Store,
) -> None:
    stage = Stage(store)
    loaded = await formal(stage)

    async def lost(version: AdapterVersion) -> AdapterVersion:
        raise AdapterError(f"{version.path} has no adapter_config.json")

    stage.engine.publish_adapter = lost  # type: ignore[method-assign]
    batch = await stage.ended(await stage.make(3, "demo:formal"))
    assert not Path(loaded.path).exists()
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.errors] == ["version_gone"]
    assert (batch.completed, batch.failed, stage.answered) == (0, 3, [])
    assert "expired" not in batch.stamps
    errors = [line["error"] for line in await stage.lines(batch.error_file)]
    assert [error["code"] for error in errors] == ["version_gone"] * 3
    assert errors[0]["message"] == batch.errors[0].message


async def test_a_start_that_closes_lines_of_a_lost_version_is_continued(store: Store) -> None:
    """Also where its files are there again: no line is answered any more."""
    before = Stage(store)
    await formal(before)
    before.wait.clear()
    made = await before.make(3, "demo:formal")
    await until(lambda: before.at_once == 3)
    await before.batches.stop()
    kept = await before.now_of(made)
    gone = replace(kept, errors=(BatchError("version_gone", "it is gone"),))
    assert await store.write(rows.update, gone, (kept.status,))
    await before.batches.cancel(made.batch_id, "")
    after = Stage(store)
    await after.engine.publish_adapter(before.engine.adapters["formal"])
    await after.batches.start()
    batch = await after.ended(made)
    assert (batch.status, batch.failed, after.answered) == (BatchStatus.FAILED, 3, [])
    assert "cancelling" not in batch.stamps
