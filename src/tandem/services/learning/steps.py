"""From samples to the engine's steps, and from outcomes back to the samples' losses.

Used by learning from feedback and by fine-tuning jobs alike. Invariant: a step's micro-batches list
their samples in order, so that every loss finds its sample again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from tandem.core.errors import EngineDead, InvalidRequest, NoMemory
from tandem.core.learning import Sample, SampleKind
from tandem.core.ports import TeachingEngine
from tandem.core.training import LossSpec, Role, StepOutcome, TrainingStep
from tandem.services.learning.encode import Encoded, Encoder
from tandem.services.learning.families import FAMILIES, Family, micro_batches, sequences_of
from tandem.services.learning.references import Model, NotFinite, References, Scored
from tandem.training.losses import micro_batch_loss, step_items

_GAINED = 0.75

AHEAD = 2
"""Steps of one trainer that the engine has at the same time."""


_Item = TypeVar("_Item")

Logprobs = Sequence[Sequence[float]]
"""Of each sequence of each micro-batch of a step: its completion's summed log-probability."""


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step and the samples of its micro-batches."""

    step: TrainingStep
    sample_ids: tuple[tuple[str, ...], ...]

    @property
    def samples(self) -> list[str]:
        """All of them, in order."""
        return [sample_id for batch in self.sample_ids for sample_id in batch]

    @property
    def _family(self) -> Family:
        return FAMILIES[SampleKind(self.step.loss.kind.value)]

    def losses(self, logprobs: Logprobs) -> dict[str, float]:
        """The loss of each sample, by what its sequences were given."""
        found: dict[str, float] = {}
        items = step_items(self.step.loss, self.step.micro_batches)
        for ids, batch, given in zip(
            self.sample_ids, self.step.micro_batches, logprobs, strict=True
        ):
            share = micro_batch_loss(self.step.loss, batch, given, items)
            found.update(zip(ids, share.item_losses, strict=True))
        return found

    def misjudged(self, logprobs: Logprobs) -> set[str]:
        """Samples whose preferred answer is not likely enough: no likelier than the rejected one,
        or with less than three quarters gained of what it lacks under the reference. Of an answer
        to imitate that has no reference nobody knows what it gained."""
        found: set[str] = set()
        for ids, batch, given in zip(
            self.sample_ids, self.step.micro_batches, logprobs, strict=True
        ):
            each = 2 if self._family.paired else 1
            for at, sample_id in zip(range(0, each * len(ids), each), ids, strict=True):
                preferred = batch[at].role in (Role.CHOSEN, Role.DESIRABLE, Role.TARGET)
                reference = batch[at].reference
                lacks = preferred and (reference < 0.0 or batch[at].role is Role.TARGET)
                unlikely = lacks and not given[at] >= (1.0 - _GAINED) * reference
                if unlikely or (each == 2 and given[at] <= given[at + 1]):
                    found.add(sample_id)
        return found

    def accuracy(self, outcome: StepOutcome) -> float | None:
        """The share of pairs with a positive implicit reward margin; None where there are none."""
        if not self._family.paired:
            return None
        wins, pairs = 0, 0
        for batch, logprobs in zip(self.step.micro_batches, outcome.logprobs, strict=True):
            rewards = [p - s.reference for s, p in zip(batch, logprobs, strict=True)]
            for at in range(0, len(rewards), 2):
                pairs += 1
                wins += rewards[at] > rewards[at + 1]
        return wins / pairs


def cut_steps(
    items: Sequence[_Item], size: int, likes: Callable[[_Item], bool]
) -> list[list[_Item]]:
    """Steps of `size` items in their order. Each has one that `likes` says is liked, if there are
    as many of these as steps: the last of them that a step can spare takes another step's first
    place."""
    steps = [list(items[at : at + size]) for at in range(0, len(items), size)]
    spare: list[tuple[list[_Item], int]] = []
    for step in steps:
        liked = [place for place, each in enumerate(step) if likes(each)]
        spare += [(step, place) for place in liked[1:]]
    for step in steps:
        if spare and not any(map(likes, step)):
            giver, place = spare.pop()
            step[0], giver[place] = giver[place], step[0]
    return steps


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the steps of one trainer have in common. `rows` bounds a micro-batch (0: nothing
    known). An update with less evidence than `full_samples` of weight 1 moves the model less (0:
    only the weights count, not the number). Where samples are `judged`, answers to imitate have a
    reference, too, though no loss needs it."""

    trainer: str
    reference: Model
    micro_batch_samples: int
    rows: int
    full_samples: int = 0
    judged: bool = False

    def scale(self, weights: Sequence[float]) -> float:
        """The share of the learning rate for a step over samples of these weights."""
        return evidence(weights, self.full_samples or len(weights))


def evidence(weights: Sequence[float], full: int) -> float:
    """What samples of these weights are worth, 1 at most, where `full` of weight 1 are worth 1."""
    return min(1.0, math.fsum(weights) / full)


class StepMaker:
    """Encodes samples, remembers their tokens, and makes steps of them."""

    def __init__(self, encoder: Encoder, references: References, shape: StepShape) -> None:
        self._encoder = encoder
        self._references = references
        self._shape = shape
        self._encoded: dict[str, Encoded] = {}
        self._last: Encoded | None = None
        self.room = 1.0
        """By what the learning rate is multiplied."""

    @property
    def shape(self) -> StepShape:
        """As given."""
        return self._shape

    def admit(self, samples: Sequence[Sample]) -> dict[str, str]:
        """Encode samples; the problem of each one that cannot be used. Blocks."""
        problems: dict[str, str] = {}
        for sample in samples:
            try:
                self._encoded[sample.sample_id] = self._encoder.encode(sample)
            except InvalidRequest as error:
                problems[sample.sample_id] = str(error)
        return problems

    def admitted(self, sample_ids: Sequence[str]) -> list[Encoded]:
        """Samples as they were encoded."""
        return [self._encoded[sample_id] for sample_id in sample_ids]

    async def prepare(
        self, step_id: str, sample_ids: Sequence[str], loss: LossSpec, urgency: float
    ) -> PreparedStep:
        """A step over admitted samples of one kind. Raises `NotFinite`, and as `score` does."""
        encoded = [self._encoded[sample_id] for sample_id in sample_ids]
        batches = micro_batches(encoded, self._shape.micro_batch_samples, self._shape.rows)
        filled = []
        fill, shape = self._references.fill, self._shape
        for batch in batches:
            sequences = sequences_of(batch, self._last, self._encoder.most_tokens)
            filled.append(await fill(shape.reference, sequences, targets=shape.judged))
            self._last = batch[-1]
        scale = self.room * self._shape.scale([each.weight for each in encoded])
        step = TrainingStep(step_id, self._shape.trainer, loss, tuple(filled), urgency, scale)
        return PreparedStep(step, tuple(tuple(e.sample_id for e in batch) for batch in batches))

    async def scored(self, prepared: PreparedStep) -> list[list[float]]:
        """What the trainer's working parameters give the sequences of a step, without training.
        Raises as `score` does."""
        return [
            await self._references.under_trainer(
                self._shape.trainer, [Scored(each.tokens, each.prompt_tokens) for each in batch]
            )
            for batch in prepared.step.micro_batches
        ]


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that was not applied; `problem` is for people."""

    sample_ids: tuple[str, ...]
    problem: str


Wanted = tuple[str, Sequence[str], LossSpec, float]
"""What `StepMaker.prepare` takes."""


def always() -> bool:
    """Never stop early."""
    return True


async def run_steps(
    client: TeachingEngine,
    maker: StepMaker,
    wanted: Sequence[Wanted],
    more: Callable[[], bool] = always,
) -> AsyncGenerator[tuple[PreparedStep, StepOutcome] | Failed, None]:
    """Train steps, a few submitted ahead; what became of each, in their order.

    Once `more()` is false, none is submitted any more, and those in the engine are waited for.
    Raises `TrainingCancelled`, `EngineDead` and, where a reference cannot be scored now,
    `NoMemory`; steps that are still in the engine when the generator is closed are cancelled.
    """
    waiting = list(wanted)
    running: list[tuple[PreparedStep, asyncio.Task[StepOutcome]] | Failed] = []
    try:
        while (waiting and more()) or running:
            while waiting and more() and len(running) < AHEAD:
                request = waiting.pop(0)
                try:
                    prepared = await maker.prepare(*request)
                except NoMemory:  # of the reference's scores: not the samples' fault
                    raise
                except (NotFinite, InvalidRequest) as error:
                    running.append(Failed(tuple(request[1]), str(error)))
                    continue
                running.append((prepared, asyncio.create_task(client.train(prepared.step))))
                await asyncio.sleep(0)  # the first of them shall be on its way before the next
            if not running:
                continue
            first = running.pop(0)
            if isinstance(first, Failed):
                yield first
                continue
            prepared, task = first
            try:
                outcome = await task
            except InvalidRequest as error:
                yield Failed(tuple(prepared.samples), str(error))
                continue
            if outcome.applied:
                yield prepared, outcome
            else:
                yield Failed(tuple(prepared.samples), outcome.problem or "the update was left out")
    finally:
        tasks = [each[1] for each in running if not isinstance(each, Failed)]
        if tasks:
            await _cancel(tasks)
            with suppress(EngineDead):  # its steps are gone then; a cancellation goes on
                await client.cancel_steps(maker.shape.trainer)


async def _cancel(tasks: Sequence[asyncio.Task[StepOutcome]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
