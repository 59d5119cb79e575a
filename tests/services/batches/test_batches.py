"""Batches over a scripted route: time that runs out, starts that overlap, bounded memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from tandem.core.batches import BatchRecord, BatchStatus, LineResult
from tandem.core.errors import Conflict, EngineDead, NotFound, QuotaExceeded
from tandem.core.learning import AdapterRecord, VersionRecord, VersionState
from tandem.core.version import AdapterVersion
from tandem.services.answering.answer import GenerationFailed
from tandem.services.answering.models import Models, Pin, ServedModel, pinned_to
from tandem.services.auth import ApiKeys, Caller
from tandem.services.batches.plan import read_asks, read_plan
from tandem.services.batches.pool import Pool
from tandem.services.batches.reply import Reply
from tandem.services.batches.service import BatchAsk, Batches
from tandem.services.batches.tools import BatchTools
from tandem.services.files import Files
from tandem.services.passed import Passed
from tandem.store import Store, adapters
from tandem.store import batches as rows

CHAT = "/v1/chat/completions"
HERE = Caller()


class Stage:
    """Batches of one start of a server over a store that outlives it."""

    def __init__(
        self, store: Store, lines: int = 8, keys: ApiKeys | None = None, now_s: float = 1000.0
    ) -> None:
        self.store = store
        self.now_s = now_s
        self.ran_s = 5.0
        self.engine = FakeEngine()
        self.answered: list[tuple[str, Pin | None]] = []
        self.at_once = self.most_at_once = 0
        self.answer: Callable[[str], Any] = lambda prompt: Reply(200, {"said": prompt}, 2, 1, 3)
        self.wait = asyncio.Event()
        self.wait.set()
        self.files = Files(store, store.directory / "files", 1 << 20, self.now)
        self.pool = Pool(lines, 10_000)
        self.tools = BatchTools(
            store, self.files, self.engine, Models(self.engine, "demo", 0), keys or ApiKeys(),
            self.respond, self.pool, 1000, 1 << 20, 10_000, self.now,
            Passed(store, self.now, lambda: self.ran_s),
        )  # fmt: skip
        self.batches = Batches(self.tools)

    def now(self) -> float:
        return self.now_s

    async def respond(
        self, batch: BatchRecord, body: bytes, caller: Caller, pinned: Pin | None
    ) -> Reply:
        prompt = json.loads(body)["prompt"]
        self.answered.append((prompt, pinned))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0.001)
            await self.wait.wait()
            found = self.answer(prompt)
            if isinstance(found, Exception):
                raise found
            return found
        finally:
            self.at_once -= 1

    async def make(
        self, count: int, model: str = "demo", caller: Caller = HERE, **more: Any
    ) -> BatchRecord:
        async def content() -> AsyncIterator[bytes]:
            for number in range(count):
                body = {"model": model, "prompt": f"p{number}"}
                line = {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}
                yield json.dumps(line).encode() + b"\n"

        file = await self.files.create("in.jsonl", "batch", caller.tenant, content())
        return await self.batches.create(BatchAsk(file.file_id, CHAT, "24h", **more), caller)

    async def ended(self, batch: BatchRecord) -> BatchRecord:
        async with asyncio.timeout(10):
            while not (batch := await self.now_of(batch)).status.ended:
                await asyncio.sleep(0.01)
        return batch

    async def now_of(self, batch: BatchRecord) -> BatchRecord:
        return await self.batches.find(batch.batch_id, batch.tenant)

    async def lines(self, file_id: str) -> list[dict[str, Any]]:
        if not file_id:
            return []
        path = await self.files.content(file_id, "")
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store.open(tmp_path)
    yield store
    store.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


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


async def formal(stage: Stage) -> AdapterVersion:
    """Version 1 of an adapter that learns."""
    path = str(stage.store.directory / "adapters/formal/1")
    version = VersionRecord("formal", 1, "hash", path, 0.0, VersionState.PUBLISHED)
    await stage.store.write(adapters.create, AdapterRecord("formal", 0.0, settings={}))
    await stage.store.write(adapters.allocate, "formal")
    await stage.store.write(adapters.publish, version)
    return await stage.engine.publish_adapter(AdapterVersion("formal", 1, "hash", path))


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


async def test_results_are_cleared_once_they_are_in_files(store: Store) -> None:
    stage = Stage(store)
    batch = await stage.ended(await stage.make(12))
    async with asyncio.timeout(5):
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
