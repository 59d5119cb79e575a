"""Batches over a scripted route: time that runs out, lines that fail, bounded memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from batch_stage import CHAT, HERE, Stage

from patience import PATIENCE_S, until
from tandem.build_app import build_batches
from tandem.config import Settings
from tandem.core.batches import BatchRecord, BatchStatus
from tandem.core.errors import Conflict, EngineDead, NotFound, QuotaExceeded, StoreError
from tandem.services.answering.answer import GenerationFailed
from tandem.services.answering.models import Pin
from tandem.services.auth import ApiKeys, Caller
from tandem.services.batches import service
from tandem.services.batches.plan import read_asks, read_plan
from tandem.services.batches.reply import Reply
from tandem.services.batches.service import BatchAsk
from tandem.store import Store
from tandem.store import batches as rows


async def test_what_is_not_answered_in_time_has_expired(store: Store) -> None:
    stage = Stage(store)
    made = await stage.ended(await stage.make(5))
    assert made.status is BatchStatus.COMPLETED
    stage.wait.clear()
    slow = await stage.make(20)
    await until(lambda: stage.at_once == 8)
    stage.now_s += 86_401
    stage.ran_s += 86_401
    batch = await stage.ended(slow)
    assert batch.status is BatchStatus.EXPIRED and "expired" in batch.stamps
    assert batch.errors == ()
    errors = await stage.lines(batch.error_file)
    assert len(errors) == 20 and batch.output_file == ""
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert stage.at_once == 0  # what was under way was given up


async def test_a_clock_that_is_ahead_ends_no_batch(store: Store) -> None:
    """Set wrong while a server runs or before it starts; a batch that it dates has its window."""
    before, days_s = Stage(store), 60 * 86_400.0
    await before.batches.start()
    before.wait.clear()
    old = await before.make(20)
    await until(lambda: before.at_once == 8)
    before.now_s += days_s
    await asyncio.sleep(1.2)  # the time is looked at each second
    assert not (await before.now_of(old)).status.ended
    await before.batches.stop()
    stage = Stage(store, now_s=1000.0 + days_s)
    stage.wait.clear()
    await stage.batches.start()
    new = await stage.make(5)
    while (await stage.now_of(new)).status is BatchStatus.VALIDATING:
        await asyncio.sleep(0.01)
    stage.ran_s += 86_399
    await asyncio.sleep(1.2)
    for batch in (old, new):
        assert not (await stage.now_of(batch)).status.ended
    stage.ran_s += 2
    stage.now_s += 86_401
    for batch in (old, new):
        assert (await stage.ended(batch)).status is BatchStatus.EXPIRED
    await stage.batches.stop()


async def test_memory_is_bounded_however_many_lines_wait(store: Store) -> None:
    stage = Stage(store, lines=5)
    batches = [await stage.make(40) for _ in range(3)]
    for batch in batches:
        await stage.ended(batch)
    assert 1 < stage.most_at_once <= 5


async def test_lines_that_begin_alike_are_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    said = [f"{'abc'[number % 3] * 50} question {number}" for number in range(9)]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": CHAT, "body": {"model": "m", "messages": [
            {"role": "user", "content": text}]}} for n, text in enumerate(said)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    plan = read_plan(path, CHAT, 100, 10_000)
    ids = [ask.custom_id for ask in read_asks(path, plan.lines)]
    assert ids == ["0", "3", "6", "1", "4", "7", "2", "5", "8"]


@pytest.mark.parametrize(
    "begins",
    [
        lambda kind: {"messages": [{"role": "system", "content": "s" * 700 + "ab"[kind] * 1500}]},
        lambda kind: {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": kind}]},
        lambda kind: {"prompt": [[kind, 2, 3, 4]]},
        lambda kind: {"prompt": [kind, 2, 3, 4]},
    ],
    ids=["long", "tools", "token ids of several", "token ids"],
)
async def test_whatever_lines_begin_with_makes_them_neighbours(
    tmp_path: Path, begins: Callable[[int], dict[str, Any]]
) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        {"custom_id": str(n), "method": "POST", "url": CHAT, "body": {"model": "m"} | begins(n % 2)}
        for n in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    asks = read_asks(path, read_plan(path, CHAT, 100, 10_000).lines)
    assert "".join(ask.custom_id for ask in asks) in ("024135", "135024")


async def test_a_long_line_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("x" * 50_000 + "\n" + "{}")
    found = read_plan(path, CHAT, 100, 1000)
    assert [error.line for error in found.errors[:2]] == [1, 2]
    assert found.errors[0].code == "invalid_json_line"


async def test_what_is_not_a_lines_fault_is_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.services.tasks.FIRST_S", 0.01)
    stage, failed = Stage(store), list[str]()

    def answer(prompt: str) -> object:
        failed.append(prompt)
        return EngineDead("gone") if failed.count(prompt) < 3 else Reply(200, {})

    stage.answer = answer
    batch = await stage.ended(await stage.make(4))
    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 4, 0)
    assert (batch.input_tokens, batch.cached_tokens, batch.output_tokens) == (0, 0, 0)
    assert len(failed) == 12


async def test_nothing_of_the_pool_is_lost_whatever_ends_a_line(store: Store) -> None:
    stage = Stage(store)
    stage.wait.clear()
    made = await stage.make(30)
    await until(lambda: stage.at_once == 8)
    await stage.batches.cancel(made.batch_id, "")
    assert (await stage.ended(made)).status is BatchStatus.CANCELLED
    another = await stage.make(30)
    await until(lambda: stage.at_once == 8)
    await stage.batches.stop()
    assert another.status is BatchStatus.VALIDATING and stage.at_once == 0
    async with asyncio.timeout(1):  # all of it is there
        for _ in range(8):
            await stage.pool.take(1250)


@pytest.mark.parametrize("error", [ValueError("ours"), GenerationFailed("nan"), EngineDead("x")])
async def test_a_line_that_always_fails_costs_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("tandem.services.tasks.FIRST_S", 0.001)
    stage = Stage(store)
    stage.answer = lambda prompt: error if prompt == "p2" else Reply(200, {})
    batch = await stage.ended(await stage.make(5))
    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 4, 1)
    [line] = await stage.lines(batch.error_file)
    assert line["custom_id"] == "r2" and line["response"]["status_code"] == 500
    told = line["response"]["body"]["error"]
    assert told["code"] == "generation_failed" and "ours" not in told["message"]


class Deadly(Stage):
    """One line ends the engine, and with it all that are in it."""

    deaths = 0

    async def respond(
        self, batch: BatchRecord, body: bytes, caller: Caller, pinned: Pin | None
    ) -> Reply:
        before = self.deaths
        if json.loads(body)["prompt"] == "p2":
            await asyncio.sleep(0.005)
            self.deaths += 1
            raise EngineDead("p2")
        for _ in range(10):
            await asyncio.sleep(0.001)
            if self.deaths > before:
                raise EngineDead("another line")
        return Reply(200, {})


async def test_a_line_that_kills_the_engine_fails_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.services.tasks.FIRST_S", 0.001)
    stage = Deadly(store)
    batch = await stage.ended(await stage.make(8))
    assert (batch.completed, batch.failed, stage.deaths) == (7, 1, 10)


async def test_results_are_cleared_once_they_are_in_files(store: Store) -> None:
    stage = Stage(store)
    batch = await stage.ended(await stage.make(12))
    async with asyncio.timeout(PATIENCE_S):
        while await store.read(rows.finished, batch.batch_id):
            await asyncio.sleep(0.01)
    assert (await stage.now_of(batch)).completed == 12
    assert await store.read(rows.uncleared) == []


async def test_a_key_has_so_many_batches_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.services.batches.service._MOST_OPEN", 2)
    stage = Stage(store)
    stage.wait.clear()
    first, _ = await stage.make(1), await stage.make(1)
    with pytest.raises(QuotaExceeded, match="2 batches of this API key"):
        await stage.make(1)
    await stage.make(1, caller=Caller("another"))
    await stage.batches.cancel(first.batch_id, "")
    await stage.ended(first)
    await stage.make(1)


async def test_a_batch_whose_commit_nobody_acknowledged_is_worked_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, write, lost = Stage(store), store.write, [True]

    async def unknown(work: Any, *args: Any, **options: Any) -> Any:
        made = await write(work, *args, **options)
        if work is service._add and lost:
            lost.pop()
            raise StoreError("the connection is gone")
        return made

    monkeypatch.setattr(store, "write", unknown)
    with pytest.raises(StoreError):
        await stage.make(3)
    [batch] = await stage.batches.listed("", None, 10)
    assert (await stage.ended(batch)).status is BatchStatus.COMPLETED


async def test_a_file_is_not_deleted_under_a_batch(store: Store) -> None:
    stage = Stage(store)
    stage.wait.clear()
    made = await stage.make(2)
    with pytest.raises(Conflict, match=made.batch_id):
        await stage.files.delete(made.input_file, "")
    await stage.batches.cancel(made.batch_id, "")
    await stage.ended(made)
    await stage.files.delete(made.input_file, "")
    with pytest.raises(NotFound):
        await stage.batches.create(BatchAsk(made.input_file, CHAT, "24h"), HERE)


async def test_lines_with_long_documents_fill_half_of_what_may_wait(store: Store) -> None:
    stage, rest = Stage(store), cast(Any, None)
    tools = cast(Any, SimpleNamespace(client=stage.engine, receipts=None))
    made = build_batches(Settings(), store, tools, stage.files, ApiKeys(), rest, rest)
    for _ in range(15):
        await made._tools.pool.take(33_000)  # 99 kB of text
    with pytest.raises(TimeoutError):  # `flex` requests have the other half
        async with asyncio.timeout(0.05):
            await made._tools.pool.take(33_000)
