"""One adapter's learning: claim samples, train, stage, measure, publish or refuse, again.

Knows one adapter; who learns when is the learner's. Invariant: samples that this claimed are, in
the end, consumed, refused, invalid, kept by a held candidate, or accepted again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from tandem.core.errors import AdapterError, EngineDead, TrainerLost, TrainingCancelled
from tandem.core.learning import (
    EventRecord,
    GateMode,
    Sample,
    SampleState,
    VersionRecord,
    VersionState,
)
from tandem.core.ports import EngineState
from tandem.core.version import AdapterVersion
from tandem.services.learning.block import Block
from tandem.services.learning.block_trainer import BlockTrainer
from tandem.services.learning.conclude import WORDS, Concluder
from tandem.services.learning.gate import Outcome, Verdict
from tandem.services.learning.loaded import Keeper, NotCopied, keep_loaded
from tandem.services.learning.publish import Conclusion, candidate_name, remove_tree
from tandem.services.learning.selection import (
    TRIES,
    candidates,
    ready_in_s,
    why_none,
)
from tandem.services.learning.settings import resolve_settings
from tandem.services.learning.steps import StepMaker
from tandem.services.learning.tools import LearningTools
from tandem.services.tasks import uninterrupted
from tandem.store import adapters, references, samples

_REPLAY_POOL = 256
_MOST_DEATHS = 8


class Progress(StrEnum):
    """What one turn of a course came to."""

    LEARNED = "learned"
    SOON = "soon"
    IDLE = "idle"


class Course:
    """The learning of the adapter `name`. `turn` does one version's worth of work."""

    def __init__(self, name: str, tools: LearningTools) -> None:
        self.name = name
        self._tools = tools
        self._client = tools.client
        self._store = tools.store
        self._keeper = Keeper(name, tools)
        self.doubtful = False
        """Whether something failed that may have been committed: the next turn looks."""
        self.took_s: float | None = None
        """Seconds from the choice of samples to their version, the last time that one was made."""
        self._trainer = BlockTrainer(name, tools)
        self._told_waits = ""  # why nothing can be learned of what waits
        self._deaths = Counter[str]()  # of the engine, while it trained these samples
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[Progress] | None = None
        self._concluding = False
        self._holders = 0  # how many are in `held`, or wait for it

    async def turn(self, slots: asyncio.Semaphore) -> Progress:
        """Make the next version, if there is something to learn from and nobody waits in `held`.
        Only work takes one of the `slots`, a wait for others on this adapter takes none. Whoever
        comes in `held` waits for no slot.

        Raises `EngineDead`, `StoreError`, `OSError`, `NoRoom` and `NoMemory`; what was claimed is
        then accepted again (or will be, by `recovery.py`).
        """
        async with self._lock:
            if self._holders:
                return Progress.SOON
            self._running = asyncio.create_task(self._in_slot(slots))
            try:
                await asyncio.wait((self._running,))
            except asyncio.CancelledError:
                if not self._concluding:
                    self._running.cancel()
                await asyncio.gather(self._running, return_exceptions=True)
                raise
            task, self._running = self._running, None
            self.doubtful = self.doubtful or task.cancelled() or task.exception() is not None
            return Progress.IDLE if task.cancelled() else task.result()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Nothing of this adapter is trained inside; what was under way is given up.

        A version that is just being published is waited for. What was loaded by hand is a version.
        """
        if self._running is not None and not self._concluding:
            self._running.cancel()
        self._holders += 1
        try:
            async with self._lock:
                await self.rest()
                await self._store.write(samples.release, self.name)
                try:
                    await keep_loaded(self._tools, self.name)
                except (AdapterError, NotCopied) as error:  # no reason to refuse what is to be done
                    await self._tools.tell(self.name, "warning", str(error), {})
                yield
        finally:
            self._holders -= 1

    @asynccontextmanager
    async def settled(self) -> AsyncIterator[None]:
        """No version is made or adopted inside; what is under way is waited for."""
        async with self._lock:
            yield

    async def keep_loaded(self) -> None:
        """See `loaded.py`. Raises `AdapterError`, `StoreError`."""
        async with self._lock:
            await keep_loaded(self._tools, self.name)

    async def free(self) -> None:
        """As `rest`, unless somebody works on this adapter."""
        if self._trainer.open_from is not None and not self._lock.locked():
            async with self._lock:
                await self.rest()

    async def rest(self) -> None:
        """Free the engine's memory; the next turn starts from the current version."""
        await self._tools.publisher.forget_references(self.name)
        await self._trainer.rest()

    async def _in_slot(self, slots: asyncio.Semaphore) -> Progress:
        if self.doubtful:  # what is committed waits for nobody's training
            adopted = await self._tools.publisher.catch_up(self.name)
            if adopted is not None:
                self._tools.metrics.version.labels(self.name).set(adopted)
            await self._store.write(samples.release, self.name)  # it may have failed as well
            self.doubtful = False
        async with slots:
            return await self._block()

    async def _block(self) -> Progress:  # noqa: C901, PLR0915
        record = await self._store.read(adapters.find, self.name)
        if record is None or not self._tools.trains:
            return Progress.IDLE
        settings = resolve_settings(self._tools.defaults, record.settings)
        fair = settings.key_share < 1.0
        waiting = await self._store.read(samples.heads, self.name, fair=fair)
        if not waiting or await self._tools.others_first(self.name):
            return Progress.IDLE
        if await self._keeper.keep():
            return Progress.LEARNED  # by somebody else; the next turn goes on from it
        left = await self._store.read(adapters.left_behind, self.name)
        seen = await self._store.read(
            samples.heads,
            self.name,
            SampleState.CONSUMED,
            newest_first=True,
            limit=_REPLAY_POOL,
            without=left,
        )
        now_s, most = self._tools.now(), settings.version_samples(replaying=bool(seen))
        if self._deaths:
            waiting = [replace(head, deaths=self._deaths[head.sample_id]) for head in waiting]
        shared = candidates(waiting, most, settings, now_s)
        await self._tell_what_waits("" if any(shared) else why_none(shared, settings))
        ready = [group for group in shared if not ready_in_s(group, most, settings, now_s)]
        if not ready:
            return Progress.SOON if any(shared) else Progress.IDLE
        chosen, begun_s = ready[0], time.monotonic()
        self._tools.publisher.require_room(self.name)
        await self._tools.publisher.require_disk(self.name)
        if self._client.state is not EngineState.READY:  # what is not claimed is not blamed
            raise EngineDead("the engine is not ready to train")
        claimed = await self._store.write(samples.claim, [head.sample_id for head in chosen])
        claimed_ids = {sample.sample_id for sample in claimed}
        chosen = [head for head in chosen if head.sample_id in claimed_ids]
        block = Block(record, settings, claimed, chosen, seen)
        try:
            maker = await self._trainer.learn(block)
            if block.latest and block.fair:
                await self._conclude(block, maker)
                self.took_s = time.monotonic() - begun_s
            elif block.known and not block.latest:
                await self._nothing_new(block)
            else:
                await self._give_up(block)
                return Progress.SOON
        except (EngineDead, TrainingCancelled) as error:
            self._trainer.open_from = None
            if isinstance(error, EngineDead) and not isinstance(error, TrainerLost):
                await self._outlived(claimed)
            await self._store.write(samples.release, self.name)
            raise
        except Exception:
            await self.rest()
            await self._store.write(samples.release, self.name)
            raise
        for sample_id in claimed_ids:
            self._deaths.pop(sample_id, None)
        return Progress.LEARNED

    async def _outlived(self, claimed: Sequence[Sample]) -> None:
        """The engine died while these were trained: half as many of them are tried next time. One
        that is alone, after many deaths, is not tried again."""
        ids = [sample.sample_id for sample in claimed]
        self._deaths.update(ids)
        if len(ids) == 1 and self._deaths[ids[0]] >= _MOST_DEATHS:
            problem = {ids[0]: "the engine ends whenever it is trained"}
            await self._store.write(samples.invalidate, problem)
            await self._tools.tell(self.name, "warning", "a sample ends the engine", problem)

    async def _tell_what_waits(self, why: str) -> None:
        """Say once why nothing can be learned of all that waits; empty: something can."""
        if why and why != self._told_waits:
            await self._tools.tell(self.name, "info", why, {})
        self._told_waits = why

    async def _nothing_new(self, block: Block) -> None:
        """The current version says already what all these samples ask for: no version is made."""
        number = block.record.current
        ids = await self._finish_known(block)
        message = f"{len(ids)} samples taught nothing new: version {number} answers like that"
        await self._tools.tell(self.name, "info", message, {"version": number, "samples": len(ids)})
        await self._store.write(samples.release, self.name)

    async def _finish_known(self, block: Block) -> list[str]:
        ids = sorted(block.known)
        await self._store.write(samples.finish, ids, SampleState.CONSUMED, block.record.current)
        return ids

    async def _give_up(self, block: Block) -> None:
        """No version comes of what is left; it is accepted again, and chosen among anew. What the
        current version knows is not: it would be chosen again, and nothing would come of it."""
        await self._finish_known(block)
        if block.latest:
            message = "samples cannot be trained on, and without them one API key has too many"
            await self._tools.tell(
                self.name, "info", f"{message}: begun again", {"samples": len(block.latest)}
            )
            await self.rest()
        await self._store.write(samples.release, self.name)

    # ------------------------------------------------------------------ publishing

    async def _conclude(self, block: Block, maker: StepMaker) -> None:
        """Have the gate look at what has come of the block, and make a version of it. A candidate
        that is refused goes on from where it is while it may and its answers get sounder: the way
        to a taste leads through broken ones."""
        publisher = self._tools.publisher
        number = await self._store.write(adapters.allocate, self.name)
        path = await publisher.staging_path(self.name, number)
        concluder = Concluder(self.name, self._trainer.name, self._tools)
        excess = math.inf
        while True:
            keys = [sample.key_id for sample in block.used]
            staged, verdict = await concluder.examine(path, block.settings, block.used, keys)
            if not (0.0 < verdict.excess < excess and block.may_go_on):
                break
            excess = verdict.excess
            await uninterrupted(self._drop(staged, path))
            await self._tools.tell(self.name, "info", _goes_on(number, verdict), verdict.metrics)
            await self._trainer.go_on(block, maker)
        try:
            publisher.require_room(self.name)  # others may have come since
        except BaseException:
            await uninterrupted(self._drop(staged, path))
            raise
        verdict.metrics["loss"] = sum(block.losses) / len(block.losses)
        verdict.metrics["steps"] = block.steps
        verdict.metrics["samples"] = len(block.used)
        rate = block.settings.optimizer(block.refusals).learning_rate
        verdict.metrics["learning_rate"] = rate * block.room
        record = VersionRecord(
            adapter=self.name,
            number=number,
            content_hash=staged.content_hash,
            path=str(publisher.path(self.name, number)),
            created_s=self._tools.now(),
            state=VersionState.CANDIDATE,
            parent=block.record.current,
            metrics=verdict.metrics,
            reason="; ".join(verdict.reasons),
        )
        self._concluding = True
        try:
            await self._settle(concluder, block, record, verdict)
        finally:
            self._concluding = False

    async def _drop(self, staged: AdapterVersion, path: Path) -> None:
        """Leave nothing of a candidate of which no version is made."""
        await self._tools.publisher.forget(candidate_name(self.name))
        await asyncio.to_thread(remove_tree, path)
        await self._store.write(references.forget, staged.content_hash)

    async def _settle(
        self, concluder: Concluder, block: Block, record: VersionRecord, verdict: Verdict
    ) -> None:
        alone = verdict.outcome is Outcome.PUBLISH and block.settings.gate is GateMode.AUTO
        record = replace(record, watched=alone)
        conclusion = Conclusion(
            record,
            consumed=[*(sample.sample_id for sample in block.used), *sorted(block.known)],
            trained_on=sorted(block.latest),
            event=_event_of(block, record, verdict, self._tools.now()),
            tries=TRIES,
        )
        self._tools.metrics.measured(self.name, verdict.metrics)
        stored_s = [sample.created_s for sample in block.used]
        await concluder.settle(conclusion, verdict.outcome, stored_s)
        if verdict.outcome is Outcome.PUBLISH:
            self._trainer.open_from = (record.number, block.refusals)
        else:
            await self.rest()
        await self._store.write(samples.release, self.name)


def _goes_on(number: int, verdict: Verdict) -> str:
    return f"training of version {number} goes on: {'; '.join(verdict.reasons)}"


def _event_of(block: Block, record: VersionRecord, verdict: Verdict, now_s: float) -> EventRecord:
    """What became of a candidate, why, what that means for its samples, and what can be done."""
    level, word = WORDS[verdict.outcome]
    parts = [f"version {record.number} {word}", *([record.reason] if record.reason else [])]
    message = ": ".join(parts)
    if verdict.outcome is Outcome.REFUSE:
        message = f"{message}. {_what_then(block, record)}"
    data = {"version": record.number, "parent": record.parent, **verdict.metrics}
    return EventRecord(record.adapter, now_s, level, message, data)


def _what_then(block: Block, record: VersionRecord) -> str:
    left, count = TRIES - block.refusals - 1, len(block.used)
    if left > 0:
        begin = f"version {record.parent}" if record.parent else "the base"
        share = 2 ** (block.refusals + 1)
        return (
            f"Its {count} samples are tried again at 1/{share} of the learning rate, from {begin} "
            f"on ({left} more {'try' if left == 1 else 'tries'}); nothing needs to be done"
        )
    return (
        f"Its {count} samples were refused {TRIES} times and are not tried again. If the answers "
        f"are what you want, publish it: tandem adapters publish {record.adapter} {record.number}; "
        "else look at these samples (docs/troubleshooting.md)"
    )
