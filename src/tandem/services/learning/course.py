"""One adapter's learning: claim samples, train, stage, measure, publish or refuse, again.

Knows one adapter; who learns when is the learner's. Invariant: samples that this claimed are, in
the end, consumed, refused, invalid, kept by a held candidate, or accepted again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from enum import StrEnum

from tandem.core.errors import AdapterError, EngineDead, TrainingCancelled
from tandem.core.learning import EventRecord, SampleKind, SampleState, VersionRecord, VersionState
from tandem.core.training import StepOutcome, TrainerSpec
from tandem.services.learning.block import Block
from tandem.services.learning.gate import Outcome, Verdict
from tandem.services.learning.loaded import Keeper, NotCopied, keep_loaded
from tandem.services.learning.publish import Conclusion, candidate_name
from tandem.services.learning.references import Model, References
from tandem.services.learning.selection import choose, plan_steps
from tandem.services.learning.settings import LearningSettings, resolve_settings
from tandem.services.learning.steps import (
    Failed,
    PreparedStep,
    StepMaker,
    StepShape,
    Wanted,
    run_steps,
)
from tandem.services.learning.tools import LearningTools
from tandem.services.uninterrupted import uninterrupted
from tandem.store import adapters, events, samples
from tandem.store.samples import SampleHead

logger = logging.getLogger(__name__)

_LINGER_S = 0.5
_REPLAY_POOL = 256


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
        self._open_from: int | None = None
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[Progress] | None = None
        self._concluding = False

    @property
    def trainer(self) -> str:
        """The trainer's name in the engine."""
        return f"learn/{self.name}"

    async def turn(self) -> Progress:
        """Make the next version, if there is something to learn from.

        Raises `EngineDead`, `StoreError`, `NoRoom` and `NoMemory`; what was claimed is then
        accepted again (or will be, by `recovery.py`).
        """
        async with self._lock:
            self._running = asyncio.create_task(self._block())
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
        async with self._lock:
            await self.rest()
            await self._store.write(samples.release, self.name)
            try:
                await keep_loaded(self._tools, self.name)
            except (AdapterError, NotCopied) as error:  # no reason to refuse what is to be done
                await self._tell("warning", str(error), {})
            yield

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
        if self._open_from is not None and not self._lock.locked():
            async with self._lock:
                await self.rest()

    async def rest(self) -> None:
        """Free the engine's memory; the next turn starts from the current version."""
        self._open_from = None
        await self._tools.publisher.forget_references(self.name)
        try:
            await self._client.close_trainer(self.trainer)
        except EngineDead:
            logger.debug("the engine is gone, and the trainer with it")

    async def _block(self) -> Progress:
        if self.doubtful:
            adopted = await self._tools.publisher.catch_up(self.name)
            if adopted is not None:
                self._tools.metrics.version.labels(self.name).set(adopted)
            self.doubtful = False
        record = await self._store.read(adapters.find, self.name)
        if record is None:
            return Progress.IDLE
        settings = resolve_settings(self._tools.defaults, record.settings)
        waiting = await self._store.read(samples.heads, self.name)
        if not waiting or await self._tools.others_first(self.name):
            return Progress.IDLE
        if await self._keeper.keep():
            return Progress.LEARNED  # by somebody else; the next turn goes on from it
        seen = await self._store.read(
            samples.heads, self.name, SampleState.CONSUMED, newest_first=True, limit=_REPLAY_POOL
        )
        now_s, most = self._tools.now(), settings.version_samples(replaying=bool(seen))
        if len(waiting) < most and now_s < _settled_s(waiting):
            return Progress.SOON
        chosen = choose(waiting, most, settings.key_share, now_s)
        if not chosen:
            return Progress.IDLE
        self._tools.publisher.require_room(self.name)
        claimed = await self._store.write(samples.claim, [head.sample_id for head in chosen])
        claimed_ids = {sample.sample_id for sample in claimed}
        chosen = [head for head in chosen if head.sample_id in claimed_ids]
        block = Block(record, settings, claimed, chosen, seen)
        try:
            maker = await self._prepare(block)
            for epoch in range(settings.epochs):
                if heads := block.unlearned():
                    await self._train(block, maker, heads, epoch)
            if block.latest and block.fair:
                await self._conclude(block)
            else:
                await self._give_up(block)
        except (EngineDead, TrainingCancelled):
            self._open_from = None
            await self._store.write(samples.release, self.name)
            raise
        except Exception:
            await self.rest()
            await self._store.write(samples.release, self.name)
            raise
        return Progress.LEARNED

    async def _give_up(self, block: Block) -> None:
        """No version comes of what is left; it is accepted again, and chosen among anew."""
        if block.latest:
            message = "samples cannot be trained on, and without them one API key has too many"
            await self._tell("info", f"{message}: begun again", {"samples": len(block.latest)})
            await self.rest()
        await self._store.write(samples.release, self.name)

    # ------------------------------------------------------------------ training

    async def _prepare(self, block: Block) -> StepMaker:
        """Encode what may be trained on and open the trainer; unusable samples become invalid."""
        replayed = await self._store.read(samples.get, [head.sample_id for head in block.seen])
        reference = await self._reference(block.settings)
        shape = StepShape(
            self.trainer,
            reference,
            block.settings.micro_batch_samples,
            self._client.info.recording_tokens,
        )
        maker = StepMaker(self._tools.encoder(block.settings), self._tools.references, shape)
        problems = await asyncio.to_thread(maker.admit, [*block.claimed, *replayed])
        await self._invalidate(block, problems)
        block.seen = [head for head in block.seen if head.sample_id not in problems]
        block.share_out(self._tools.now())
        if block.chosen:
            await self._open(block)
        return maker

    async def _reference(self, settings: LearningSettings) -> Model:
        number = settings.reference_version
        if not number:
            return self._tools.references.base
        version = await self._store.read(adapters.version, self.name, number)
        if version is None:
            raise AdapterError(f"the reference {settings.reference} of '{self.name}' is gone")
        loaded = await self._tools.publisher.load_reference(version)
        return References.version(loaded.name, loaded)

    async def _open(self, block: Block) -> None:
        """Open the trainer at the current version, unless it is open there."""
        current = block.record.current
        if self._open_from == current:
            return
        version = await self._store.read(adapters.version, self.name, current)
        await self._client.open_trainer(
            TrainerSpec(
                name=self.trainer,
                lora=block.settings.lora,
                optimizer=block.settings.optimizer,
                source=version.path if version is not None else "",
            )
        )
        self._open_from = current

    async def _train(
        self, block: Block, maker: StepMaker, heads: Sequence[SampleHead], epoch: int
    ) -> None:
        """Once over `heads`."""
        plans = plan_steps(heads, block.seen, block.settings, epoch)
        wanted = [
            _wanted(plan.sample_ids, plan.kind, block.settings, plan.urgency) for plan in plans
        ]
        failed: list[Failed] = []
        async with aclosing(run_steps(self._client, maker, wanted)) as results:
            async for result in results:
                if isinstance(result, Failed):
                    failed.append(result)
                    self._tools.metrics.steps.labels(self.name, "failed").inc()
                else:
                    await self._applied(block, *result)
        if failed:
            await self._isolate(block, maker, failed)

    async def _applied(self, block: Block, prepared: PreparedStep, outcome: StepOutcome) -> None:
        losses = prepared.losses(outcome)
        await self._store.write(samples.record_losses, losses)
        block.latest.update(losses)
        block.misjudged = (block.misjudged - losses.keys()) | prepared.misjudged(outcome)
        block.losses.append(outcome.loss)
        block.steps += 1
        metrics = self._tools.metrics
        metrics.loss.labels(self.name).set(outcome.loss)
        metrics.steps.labels(self.name, "applied").inc()
        metrics.step_time.observe(max(0.0, outcome.finished_s - outcome.started_s))

    async def _isolate(self, block: Block, maker: StepMaker, failed: Sequence[Failed]) -> None:
        """Train the samples of failed steps one by one: those that fail alone are invalid.

        Each is tried once, so that nothing loops.
        """
        kinds = {sample.sample_id: sample.kind for sample in block.claimed}
        suspects = dict.fromkeys(sample_id for step in failed for sample_id in step.sample_ids)
        alone = [
            _wanted((sample_id,), kinds[sample_id], block.settings, 0.0)
            for sample_id in suspects
            if sample_id in kinds
        ]
        problems: dict[str, str] = {}
        async with aclosing(run_steps(self._client, maker, alone)) as results:
            async for result in results:
                if isinstance(result, Failed):
                    problems[result.sample_ids[0]] = result.problem
                else:
                    await self._applied(block, *result)
        await self._invalidate(block, problems)

    async def _invalidate(self, block: Block, problems: dict[str, str]) -> None:
        if not problems:
            return
        block.chosen = [head for head in block.chosen if head.sample_id not in problems]
        await self._store.write(samples.invalidate, problems)
        await self._tell(
            "warning",
            f"{len(problems)} samples cannot be trained on",
            {"problems": dict(list(problems.items())[:10])},
        )

    # ------------------------------------------------------------------ publishing

    async def _conclude(self, block: Block) -> None:
        publisher = self._tools.publisher
        number = await self._store.write(adapters.allocate, self.name)
        path = await publisher.staging_path(self.name, number)
        try:
            # Given up half way, the engine would still write, and then load what nobody knows of.
            staged = await uninterrupted(
                self._client.stage(self.trainer, candidate_name(self.name), str(path))
            )
            verdict = await self._tools.examiner.examine(
                self.name,
                staged,
                block.settings,
                [sample.key_id for sample in block.used],
                self._tools.encoder(block.settings),
            )
            publisher.require_room(self.name)  # others may have come since
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            await publisher.forget(candidate_name(self.name))
            raise
        verdict.metrics["loss"] = sum(block.losses) / len(block.losses)
        verdict.metrics["steps"] = block.steps
        verdict.metrics["samples"] = len(block.used)
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
            await self._settle(block, record, verdict)
        finally:
            self._concluding = False

    async def _settle(self, block: Block, record: VersionRecord, verdict: Verdict) -> None:
        conclusion = Conclusion(
            record,
            consumed=[sample.sample_id for sample in block.used],
            trained_on=sorted(block.latest),
            event=_event_of(record, verdict, self._tools.now()),
        )
        publisher, metrics = self._tools.publisher, self._tools.metrics
        metrics.measured(self.name, verdict.metrics)
        if verdict.outcome is Outcome.PUBLISH:
            stored = [sample.created_s for sample in block.used]
            self._tools.freshness.published(record, stored)  # before it answers
            await publisher.publish(conclusion)
            metrics.versions.labels(self.name, "published").inc()
            metrics.version.labels(self.name).set(record.number)
            self._open_from = record.number
        elif verdict.outcome is Outcome.REFUSE:
            await publisher.refuse(conclusion)
            metrics.versions.labels(self.name, "refused").inc()
            await self.rest()
        else:
            await publisher.hold(conclusion)
            metrics.versions.labels(self.name, "held").inc()
            await self.rest()
        await self._store.write(samples.release, self.name)

    async def _tell(self, level: str, message: str, data: dict[str, object]) -> None:
        event = EventRecord(self.name, self._tools.now(), level, message, data)
        await self._store.write(events.add, event)


def _settled_s(waiting: Sequence[SampleHead]) -> float:
    """When a few samples are enough: nothing came for a while, or the first waited long."""
    return min(waiting[-1].created_s + _LINGER_S, waiting[0].created_s + 4 * _LINGER_S)


def _wanted(
    sample_ids: Sequence[str], kind: SampleKind, settings: LearningSettings, urgency: float
) -> Wanted:
    return f"step-{uuid.uuid4().hex}", sample_ids, settings.loss(kind), urgency


def _event_of(record: VersionRecord, verdict: Verdict, now_s: float) -> EventRecord:
    words = {
        Outcome.PUBLISH: ("info", "published"),
        Outcome.HOLD: ("info", "waits for a decision"),
        Outcome.REFUSE: ("warning", "refused"),
    }
    level, word = words[verdict.outcome]
    why = f": {record.reason}" if record.reason else ""
    data = {"version": record.number, "parent": record.parent, **verdict.metrics}
    return EventRecord(record.adapter, now_s, level, f"version {record.number} {word}{why}", data)
