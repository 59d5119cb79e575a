"""Batches that more than one start of a server works on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from batch_stage import Stage

from patience import until
from tandem.core.batches import WORKED_UNTIL, BatchRecord, BatchStatus, LineResult
from tandem.core.errors import StoreError
from tandem.services.auth import ApiKeys, Caller
from tandem.services.batches.reply import Reply
from tandem.services.files import Files
from tandem.store import Store
from tandem.store import batches as rows


async def test_a_start_that_is_over_commits_nothing(store: Store) -> None:
    """The old one hangs in its answers while a new one has taken the batch over."""
    old = Stage(store)
    old.wait.clear()
    made = await old.make(6)
    await until(lambda: old.at_once == 6)
    new = Stage(store)
    new.answer = lambda prompt: Reply(200, {"said": f"new {prompt}"})
    await new.batches.start()
    batch = await new.ended(made)
    old.wait.set()
    await until(lambda: old.at_once == 0)
    await asyncio.sleep(0.05)
    output = await new.lines(batch.output_file)
    said = [line["response"]["body"]["said"] for line in output]
    assert said == [f"new p{number}" for number in range(6)] and batch.start == 2
    late = LineResult(made.batch_id, 99, True, "late")
    with pytest.raises(rows.Superseded):
        await store.write(rows.keep, made, [late])
    await old.batches.stop()


async def test_a_start_in_the_middle_of_the_end_writes_each_file_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(store)
    whole, written = Files.create, list[str]()

    async def dies(self: Files, filename: str, *rest: Any, **named: Any) -> Any:
        made = await whole(self, filename, *rest, **named)
        if named.get("file_id"):
            written.append(filename)
            if len(written) == 1:
                raise asyncio.CancelledError  # as if the process ended here
        return made

    monkeypatch.setattr(Files, "create", dies)
    stage.answer = lambda prompt: Reply(400 if prompt == "p1" else 200, {})
    made = await stage.make(3)
    await until(lambda: len(written) == 1)
    again = Stage(store)
    await again.batches.start()
    batch = await again.ended(made)
    assert batch.status is BatchStatus.COMPLETED
    assert len(await again.lines(batch.output_file)) == 2
    assert len(await again.lines(batch.error_file)) == 1
    assert written == [f"{batch.batch_id}_output.jsonl", f"{batch.batch_id}_error.jsonl"]


async def test_a_cancelled_batch_that_was_never_read_ends_at_the_next_start(store: Store) -> None:
    old = Stage(store)
    async with old.tools.reading:  # it is not validated yet
        made = await old.make(3)
        await old.batches.cancel(made.batch_id, "")
        await old.batches.stop()
    new = Stage(store)
    await new.batches.start()
    batch = await new.ended(made)
    assert (batch.status, batch.total, batch.failed) == (BatchStatus.CANCELLED, 3, 3)
    errors = await new.lines(batch.error_file)
    assert [line["error"]["code"] for line in errors] == ["batch_cancelled"] * 3
    assert new.answered == []


async def test_a_file_that_changed_ends_the_batch_with_what_was_answered(store: Store) -> None:
    old = Stage(store)
    asked = list[str]()

    def answer(prompt: str) -> Reply:
        asked.append(prompt)
        if len(asked) == 4:
            old.wait.clear()
        return Reply(200, {})

    old.answer = answer
    made = await old.make(20)
    await until(lambda: old.at_once == 8 and not old.wait.is_set())
    kept = (await old.now_of(made)).completed
    await old.batches.stop()
    assert kept > 0
    path = await old.files.content(made.input_file, "")
    path.write_text("{}\n")
    new = Stage(store)
    await new.batches.start()
    batch = await new.ended(made)
    assert batch.status is BatchStatus.FAILED
    assert [error.code for error in batch.errors] == ["file_gone"]
    assert len(await new.lines(batch.output_file)) == batch.completed >= kept
    assert new.answered == []


async def test_lines_wait_while_their_key_is_away(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.services.tasks.FIRST_S", 0.01)
    owner = Caller("one")
    known = ApiKeys([(b"digest", owner)])
    old = Stage(store, keys=known)
    old.wait.clear()
    made = await old.make(2, caller=owner)
    await until(lambda: old.at_once == 2)
    await old.batches.stop()
    without = Stage(store, keys=ApiKeys([(b"other", Caller("two"))]))
    await without.batches.start()
    await asyncio.sleep(0.1)
    assert without.answered == []
    await without.batches.stop()
    open_server = Stage(store)  # needs no key: the owner's name stays with the batch
    await open_server.batches.start()
    assert (await open_server.ended(made)).completed == 2


async def test_lines_without_a_key_leave_the_room_to_others(store: Store) -> None:
    old = Stage(store)
    old.wait.clear()
    made = await old.make(20)
    await until(lambda: old.at_once == 8)
    await old.batches.stop()
    owner = Caller("one")
    stage = Stage(store, keys=ApiKeys([(b"digest", owner)]))
    await stage.batches.start()
    await asyncio.sleep(0.05)
    assert (await stage.ended(await stage.make(3, caller=owner))).completed == 3
    assert (await stage.now_of(made)).completed == 0
    stage.ran_s += 86_401
    assert (await stage.ended(made)).status is BatchStatus.EXPIRED


async def noted(stage: Stage, batch: BatchRecord) -> bool:
    """Whether the store knows how long it was worked on."""
    return WORKED_UNTIL in (await stage.now_of(batch)).stamps


async def test_the_window_goes_on_over_starts(store: Store) -> None:
    """An hour in which no server runs does not count, nor does a clock that is set late."""
    old = Stage(store)
    old.wait.clear()
    made = await old.make(2)
    await until(lambda: old.at_once == 2)
    old.now_s += 80_000
    old.ran_s += 80_000
    await until(lambda: noted(old, made))  # the time is looked at each second
    await old.batches.stop()
    new = Stage(store, now_s=1.0)
    new.wait.clear()
    await new.batches.start()
    await until(lambda: new.at_once == 2)
    new.now_s += 80_000 + 3600
    new.ran_s += 6_300
    await asyncio.sleep(1.2)
    assert not (await new.now_of(made)).status.ended
    new.ran_s += 200
    assert (await new.ended(made)).status is BatchStatus.EXPIRED


async def test_a_batch_that_has_expired_answers_no_line_after_a_restart(store: Store) -> None:
    old = Stage(store)
    old.wait.clear()
    made = await old.make(2)
    await until(lambda: old.at_once == 2)
    await old.batches.stop()
    kept = await old.now_of(made)
    expired = replace(kept, stamps={**kept.stamps, "expired": 1001.0})
    assert await store.write(rows.update, expired, (kept.status,))
    late = await old.batches.cancel(made.batch_id, "")
    assert late.status is BatchStatus.IN_PROGRESS
    new = Stage(store)
    await new.batches.start()
    batch = await new.ended(made)
    assert (batch.status, batch.failed) == (BatchStatus.EXPIRED, 2)
    assert new.answered == [] and "cancelling" not in batch.stamps


async def test_a_batch_that_is_cancelled_as_it_expires_is_cancelled(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(store)
    stage.wait.clear()
    made = await stage.make(2)
    await until(lambda: stage.at_once == 2)
    whole = rows.update

    def cancelled_before(connection: Any, batch: BatchRecord, was: Any) -> bool:
        if "expired" in batch.stamps:
            rows.cancel(connection, batch.batch_id, stage.now_s)
        return whole(connection, batch, was)

    monkeypatch.setattr(rows, "update", cancelled_before)
    stage.ran_s += 86_401
    batch = await stage.ended(made)
    assert batch.status is BatchStatus.CANCELLED and "expired" not in batch.stamps
    codes = [line["error"]["code"] for line in await stage.lines(batch.error_file)]
    assert codes == ["batch_cancelled"] * 2


async def test_a_store_that_cannot_note_the_time_expires_no_line(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.services.tasks.FIRST_S", 0.01)
    stage = Stage(store)
    stage.wait.clear()
    made = await stage.make(2)
    await until(lambda: stage.at_once == 2)
    whole, failures = rows.update, list[str]()

    def fails_once(*args: Any) -> bool:
        if not failures:
            failures.append("disk")
            raise StoreError("the disk is full")
        return whole(*args)

    monkeypatch.setattr(rows, "update", fails_once)
    stage.ran_s += 100
    await until(lambda: bool(failures))
    stage.wait.set()
    batch = await stage.ended(made)
    assert (batch.status, batch.completed, batch.start) == (BatchStatus.COMPLETED, 2, 2)


async def test_lines_wait_while_their_model_is_away(store: Store) -> None:
    """A start with another model, or without an adapter that was loaded, refuses none of them."""
    old = Stage(store)
    await old.engine.load_adapter("formal", "/formal")
    old.wait.clear()
    made = [await old.make(2), await old.make(2, "demo:formal")]
    await until(lambda: old.at_once == 4)
    await old.batches.stop()
    other = Stage(store, model="another")
    await other.batches.start()
    assert (await other.ended(await other.make(1, "another"))).completed == 1
    assert len(other.answered) == 1
    assert [(await other.now_of(each)).completed for each in made] == [0, 0]
    await other.batches.stop()
    new = Stage(store)
    await new.batches.start()
    assert (await new.ended(made[0])).completed == 2
    assert (await new.now_of(made[1])).completed == 0
    await new.engine.load_adapter("formal", "/formal")
    assert (await new.ended(made[1])).completed == 2
