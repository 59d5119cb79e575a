"""Batches of one start of a server over a scripted route and a store that outlives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fake_engine import FakeEngine
from patience import PATIENCE_S
from tandem.core.batches import BatchRecord
from tandem.services.answering.models import Models, Pin
from tandem.services.auth import ApiKeys, Caller
from tandem.services.batches.pool import Pool
from tandem.services.batches.reply import Reply
from tandem.services.batches.service import BatchAsk, Batches
from tandem.services.batches.tools import BatchTools
from tandem.services.files import Files
from tandem.services.passed import Passed
from tandem.store import Store

CHAT = "/v1/chat/completions"
HERE = Caller()


class Stage:
    """Batches of one start of a server over a store that outlives it."""

    def __init__(
        self,
        store: Store,
        lines: int = 8,
        keys: ApiKeys | None = None,
        now_s: float = 1000.0,
        model: str = "demo",
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
            store, self.files, self.engine, Models(self.engine, model, 0), keys or ApiKeys(),
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
        async with asyncio.timeout(PATIENCE_S):
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
