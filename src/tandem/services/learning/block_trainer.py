"""Trains what a course has claimed: encode, open the trainer, go over the samples.

Knows the samples of one adapter and its trainer in the engine; what becomes of the result is the
course's. Invariant: what cannot be trained on leaves the block and is `invalid` in the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import aclosing
from statistics import fmean

from tandem.core.errors import AdapterError, EngineDead, InvalidRequest, NoMemory
from tandem.core.learning import GateMode, Sample, SampleKind
from tandem.core.plan import NO_MEMORY
from tandem.core.training import StepOutcome, TrainerSpec
from tandem.services.learning.answer_faults import repeats
from tandem.services.learning.block import Block
from tandem.services.learning.encode import Encoded
from tandem.services.learning.references import Model, NotFinite
from tandem.services.learning.selection import plan_steps
from tandem.services.learning.settings import LOOK_EVERY, LearningSettings
from tandem.services.learning.steps import (
    Failed,
    PreparedStep,
    StepMaker,
    StepShape,
    Wanted,
    run_steps,
)
from tandem.services.learning.tools import LearningTools
from tandem.store import adapters, samples
from tandem.store.samples import SampleHead

logger = logging.getLogger(__name__)

# How much smaller the steps become, at most, on the way to the end of the trust region.
_LEAST_ROOM = 0.05
# So often, and for so long, there was no room for a sample that is too large.
_MOST_SHORTAGES = 4
_SHORT_FOR_S = 60.0


class BlockTrainer:
    """The trainer of the adapter `name` in the engine, and what is done with it."""

    def __init__(self, name: str, tools: LearningTools) -> None:
        self._name = name
        self._tools = tools
        self._client = tools.client
        self._store = tools.store
        self._short: dict[str, tuple[int, float]] = {}  # without room: how often, and since when
        self.open_from: tuple[int, int] | None = None
        """The version that it was opened at, or has become, and how often the rate was halved."""

    @property
    def name(self) -> str:
        """Its name in the engine."""
        return f"learn/{self._name}"

    async def rest(self) -> None:
        """Free the engine's memory; what was trained since the last version is lost."""
        self.open_from = None
        try:
            await self._client.close_trainer(self.name)
        except EngineDead:
            logger.debug("the engine is gone, and the trainer with it")

    async def _prepare(self, block: Block) -> StepMaker:
        """Encode what may be trained on and open the trainer; unusable samples become invalid."""
        replayed = await self._store.read(samples.get, [head.sample_id for head in block.seen])
        reference = await self._reference(block.settings)
        shape = StepShape(
            self.name,
            reference,
            block.settings.micro_batch_samples,
            self._client.info.recording_tokens,
            block.settings.batch_samples,
            judged=True,
        )
        maker = StepMaker(self._tools.encoder(block.settings), self._tools.references, shape)
        problems = await asyncio.to_thread(maker.admit, [*block.claimed, *replayed])
        sound = [each for each in block.claimed if each.sample_id not in problems]
        problems |= await asyncio.to_thread(_repetitive, sound)
        if block.settings.gate is not GateMode.ALWAYS:
            rest = [each.sample_id for each in block.claimed if each.sample_id not in problems]
            problems |= await self._noise(block, maker.admitted(rest))
        claimed = {each.sample_id for each in block.claimed}
        await self._invalidate(block, {k: why for k, why in problems.items() if k in claimed})
        # Some may have been erased meanwhile.
        usable = {each.sample_id for each in replayed} - problems.keys()
        block.seen = [head for head in block.seen if head.sample_id in usable]
        block.share_out(self._tools.now())
        if block.chosen:
            await self._open(block)
        if block.chosen and block.record.current:
            losses, misjudged = await self._judge(block, maker, block.chosen)
            block.meet(losses, misjudged, self._tools.now())
        return maker

    async def _noise(self, block: Block, usable: Sequence[Encoded]) -> dict[str, str]:
        """Samples that are not worth a version, which the gate would most likely refuse."""
        encoder = self._tools.encoder(block.settings)
        found = await self._tools.examiner.noise(usable, encoder)
        return {
            key: f"its answer reads like noise to the base model: {each:.1f} nats a token less "
            "likely than what that says itself"
            for key, each in found.items()
        }

    async def _judge(
        self, block: Block, maker: StepMaker, heads: Sequence[SampleHead]
    ) -> tuple[dict[str, float], set[str]]:
        """The loss of each sample under the working parameters as they are, and those of which the
        preferred answer is not likely enough."""
        losses: dict[str, float] = {}
        misjudged: set[str] = set()
        for plan in plan_steps(heads, (), block.settings):
            wanted = _wanted(plan.sample_ids, plan.kind, block.settings, 0.0)
            try:
                prepared = await maker.prepare(*wanted)
            except NoMemory:
                raise
            except (NotFinite, InvalidRequest):
                continue  # training finds out which of them it is
            given = await maker.scored(prepared)
            losses |= prepared.losses(given)
            misjudged |= prepared.misjudged(given)
        return losses, misjudged

    async def _reference(self, settings: LearningSettings) -> Model:
        number = settings.reference_version
        if not number:
            return self._tools.references.base
        version = await self._store.read(adapters.version, self._name, number)
        if version is None:
            raise AdapterError(f"the reference {settings.reference} of '{self._name}' is gone")
        loaded = await self._tools.publisher.load_reference(version)
        return self._tools.references.version(loaded.name, loaded)

    async def _open(self, block: Block) -> None:
        """Open the trainer at the current version, unless it is open there. Samples of a candidate
        that was refused are learned at half the rate."""
        current, refusals = block.record.current, block.refusals
        if self.open_from == (current, refusals):
            return
        version = await self._store.read(adapters.version, self._name, current)
        await self._client.open_trainer(
            TrainerSpec(
                name=self.name,
                lora=block.settings.lora,
                optimizer=block.settings.optimizer(refusals),
                source=version.path if version is not None else "",
            )
        )
        self.open_from = (current, refusals)

    async def learn(self, block: Block) -> StepMaker:
        """Go over the samples until most are learned (a first version: and nine full steps are
        made), or the model has moved far enough to be looked at. Half the rate takes twice the
        epochs.

        The trust region is a bound on what answers to trusted prompts may lose. Training ends
        before the epoch that would leave it, if that moves the model as far as the last one did,
        and the less of the region earlier versions have left, the smaller are the steps. Nothing
        predicts the first epoch. What makes its steps goes on with it. Raises as the engine client
        does, and `AdapterError`.
        """
        maker = await self._prepare(block)
        if block.chosen and block.record.current:
            block.began = block.drift = block.ahead = await self._drift(block)
        maker.room = block.room = min(1.0, max(_LEAST_ROOM, 1.0 - block.began))
        while (heads := block.unlearned()) and await self._epoch(block, maker, heads):
            pass
        return maker

    async def go_on(self, block: Block, maker: StepMaker) -> None:
        """Go over all samples of a block that `may_go_on` again, until the next look at it is due.
        Raises as `learn`."""
        due = block.way + LOOK_EVERY
        while block.may_go_on and block.way < due:
            await self._epoch(block, maker, block.everything())

    async def _epoch(self, block: Block, maker: StepMaker, heads: Sequence[SampleHead]) -> bool:
        """Once over `heads`; whether anything was learned."""
        await self._train(block, maker, heads, block.epochs)
        if block.latest:
            block.moved(await self._drift(block))
            logger.info(
                "%s: epoch %d, %d steps, loss %.3f, %.0f%% of the allowed drift",
                self._name,
                block.epochs,
                block.steps,
                fmean(block.losses),
                100 * block.drift,
            )
        return bool(block.latest)

    async def _drift(self, block: Block) -> float:
        encoder = self._tools.encoder(block.settings)
        return await self._tools.examiner.drift(self.name, self._name, encoder)

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
                    self._tools.metrics.steps.labels(self._name, "failed").inc()
                else:
                    await self._applied(block, *result)
        if failed:
            await self._isolate(block, maker, failed)

    async def _applied(self, block: Block, prepared: PreparedStep, outcome: StepOutcome) -> None:
        losses = prepared.losses(outcome.logprobs)
        for sample_id in losses:
            self._short.pop(sample_id, None)
        await self._store.write(samples.record_losses, losses)
        block.latest.update(losses)
        block.misjudged = (block.misjudged - losses.keys()) | prepared.misjudged(outcome.logprobs)
        block.losses.append(outcome.loss)
        block.steps += 1
        block.way += prepared.step.scale / block.room / 2**block.refusals
        metrics = self._tools.metrics
        metrics.loss.labels(self._name).set(outcome.loss)
        metrics.steps.labels(self._name, "applied").inc()
        metrics.step_time.observe(max(0.0, outcome.finished_s - outcome.started_s))

    async def _isolate(self, block: Block, maker: StepMaker, failed: Sequence[Failed]) -> None:
        """Train the samples of failed steps one by one: those that fail alone are invalid.

        Each is tried once, so that nothing loops. What finds no room is accepted again, so that the
        others are learned. Raises `NoMemory` if nothing of the block has found any.
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
        short = {sample_id for sample_id, why in problems.items() if why == NO_MEMORY}
        # Where several find no room for the first time, and nothing else has, none is too large.
        told = block.steps or len(alone) == 1 or short <= self._short.keys()
        lasting = self._lasting(short) if told else set[str]()
        left = short - lasting
        await self._invalidate(block, {k: why for k, why in problems.items() if k not in left})
        block.chosen = [head for head in block.chosen if head.sample_id not in left]
        if left and not block.steps:
            raise NoMemory(NO_MEMORY)

    def _lasting(self, short: Collection[str]) -> set[str]:
        """Samples that have found no room several times, for a while."""
        found, now_s = set[str](), time.monotonic()
        for sample_id in short:
            times, since_s = self._short.get(sample_id, (0, now_s))
            self._short[sample_id] = times + 1, since_s
            if times + 1 >= _MOST_SHORTAGES and now_s - since_s >= _SHORT_FOR_S:
                found.add(sample_id)
        return found

    async def _invalidate(self, block: Block, problems: dict[str, str]) -> None:
        if not problems:
            return
        block.chosen = [head for head in block.chosen if head.sample_id not in problems]
        for sample_id in problems:
            self._short.pop(sample_id, None)
        await self._store.write(samples.invalidate, problems)
        message = f"{len(problems)} samples cannot be trained on"
        data = {"problems": dict(list(problems.items())[:10])}
        await self._tools.tell(self._name, "warning", message, data)


def _repetitive(claimed: Sequence[Sample]) -> dict[str, str]:
    """Samples whose answer to imitate repeats itself, all of it or from its middle on. The gate
    reads the beginnings of answers, and refuses the samples beside as well."""
    return {
        each.sample_id: "its answer repeats itself over and over"
        for each in claimed
        if (each.desirable or each.kind is not SampleKind.KTO) and repeats(each.chosen)
    }


def _wanted(
    sample_ids: Sequence[str], kind: SampleKind, settings: LearningSettings, urgency: float
) -> Wanted:
    return f"step-{uuid.uuid4().hex}", sample_ids, settings.loss(kind), urgency
