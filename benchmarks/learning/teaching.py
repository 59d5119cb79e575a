"""Turns arriving pairs into steps, and steps into versions that serve: a small learner.

Scores each pair's reference under the base model, submits DPO steps as the rule chooses them,
and publishes every few updates without asking a gate (MACE's profile). Keeps nothing durable; the
server's own learner does. Invariant: a version is recorded when the engine has adopted it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.learning.lessons import Rule
from benchmarks.learning.stream import EncodedPair
from tandem.core.errors import TrainingCancelled
from tandem.core.ports import EngineClient
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    OptimizerSpec,
    Role,
    ScoreRequest,
    StepOutcome,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.core.version import AdapterVersion
from tandem.training.losses import micro_batch_loss, step_items

ADAPTER = "learner"
_CANDIDATE = "~candidate"


@dataclass(frozen=True, slots=True)
class TeachingOptions:
    """Shape of the adapter and of its steps; a version comes after `steps_per_version` updates."""

    rank: int = 16
    alpha: float = 32.0
    learning_rate: float = 1e-2
    beta: float = 0.05
    batch: int = 8
    micro_batch: int = 2
    steps_per_version: int = 1


@dataclass(frozen=True, slots=True)
class Published:
    """A version, when it began to serve, and after how many updates it was taken."""

    at_s: float
    number: int
    content_hash: str
    path: str
    updates: int


@dataclass(slots=True)
class Lessons:
    """What was taught in a run. `freshness_s`: from each pair's arrival to its first version."""

    versions: list[Published] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    uses: int = 0
    training_tokens: int = 0
    freshness_s: list[float] = field(default_factory=list)
    not_applied: int = 0


class Teacher:
    """See the module. `now` is seconds since the run began."""

    def __init__(
        self,
        client: EngineClient,
        rule: Rule,
        options: TeachingOptions,
        folder: Path,
        now: Callable[[], float],
    ) -> None:
        self._client = client
        self._rule = rule
        self._options = options
        self._folder = folder
        self._now = now
        self._pairs: dict[int, EncodedPair] = {}
        self._references: dict[int, tuple[float, float]] = {}
        self._arrived_s: dict[int, float] = {}
        self._unpublished: set[int] = set()
        self._served: set[int] = set()
        self._updates = 0
        self._steps = 0
        self._admitting: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.lessons = Lessons()

    async def open(self) -> None:
        """Open the trainer, fresh."""
        options = self._options
        spec = TrainerSpec(
            ADAPTER,
            LoraSpec(options.rank, options.alpha),
            OptimizerSpec(learning_rate=options.learning_rate),
        )
        await self._client.open_trainer(spec)

    def add(self, number: int, pair: EncodedPair) -> None:
        """A pair has arrived."""
        self._pairs[number] = pair
        self._arrived_s[number] = self._now()
        task = asyncio.create_task(self._admit(number))
        self._admitting.add(task)
        task.add_done_callback(self._admitting.discard)

    async def _admit(self, number: int) -> None:
        requests = score_requests(self._pairs[number], None, f"reference {number}")
        chosen, rejected = await asyncio.gather(*map(self._client.score, requests))
        self._references[number] = (chosen.logprob, rejected.logprob)
        self._rule.add(number, self._now())
        self._wake.set()

    async def run(self) -> None:
        """Teach until cancelled; then what is queued is given up and the trainer closed."""
        running: dict[asyncio.Task[StepOutcome], tuple[int, ...]] = {}
        try:
            while True:
                while pairs := self._rule.take(self._now(), len(running)):
                    running[asyncio.create_task(self._client.train(self._step(pairs)))] = pairs
                self._wake.clear()
                woken = asyncio.create_task(self._wake.wait())
                await asyncio.wait((woken, *running), return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                for step in [step for step in running if step.done()]:
                    self._learnt(running.pop(step), step.result())
                due = self._updates - self._last_update >= self._options.steps_per_version
                if self._updates > self._last_update and (due or not running):
                    await self._publish()
        finally:
            for task in self._admitting:
                task.cancel()
            await self._client.cancel_steps(ADAPTER)
            ended = await asyncio.gather(*running, *self._admitting, return_exceptions=True)
            await self._client.close_trainer(ADAPTER)
            for error in ended:
                if isinstance(error, Exception) and not isinstance(error, TrainingCancelled):
                    raise error

    @property
    def _last_update(self) -> int:
        return self.lessons.versions[-1].updates if self.lessons.versions else 0

    def _step(self, pairs: tuple[int, ...]) -> TrainingStep:
        self._steps += 1
        size = self._options.micro_batch
        groups = [pairs[at : at + size] for at in range(0, len(pairs), size)]
        return TrainingStep(
            f"step-{self._steps}",
            ADAPTER,
            self._loss,
            tuple(
                tuple(seq for pair in group for seq in self._sequences(pair)) for group in groups
            ),
        )

    @property
    def _loss(self) -> LossSpec:
        return LossSpec(LossKind.DPO, beta=self._options.beta)

    def _sequences(self, number: int) -> tuple[TrainingSequence, TrainingSequence]:
        pair, references = self._pairs[number], self._references[number]
        prompt = len(pair.prompt)
        return (
            TrainingSequence(pair.prompt + pair.chosen, prompt, Role.CHOSEN, references[0]),
            TrainingSequence(pair.prompt + pair.rejected, prompt, Role.REJECTED, references[1]),
        )

    def _learnt(self, pairs: tuple[int, ...], outcome: StepOutcome) -> None:
        if not outcome.applied:
            self.lessons.not_applied += 1
            self._rule.learnt(dict.fromkeys(pairs, 0.0))
            return
        self._updates += 1
        self.lessons.losses.append(outcome.loss)
        self.lessons.uses += len(pairs)
        self._unpublished.update(pairs)
        self._rule.learnt(self._losses(pairs, outcome))

    def _losses(self, pairs: tuple[int, ...], outcome: StepOutcome) -> dict[int, float]:
        found: list[float] = []
        for at, logprobs in enumerate(outcome.logprobs):
            group = pairs[at * self._options.micro_batch :][: self._options.micro_batch]
            batch = tuple(seq for pair in group for seq in self._sequences(pair))
            self.lessons.training_tokens += sum(seq.rows for seq in batch)
            items = step_items(self._loss, (batch,))
            found += micro_batch_loss(self._loss, batch, logprobs, items).item_losses
        return dict(zip(pairs, found, strict=True))

    async def _publish(self) -> None:
        taught, updates = self._unpublished, self._updates
        self._unpublished = set()
        number = len(self.lessons.versions) + 1
        path = self._folder / str(number)
        staged = await self._client.stage(ADAPTER, _CANDIDATE, str(path))
        version = AdapterVersion(ADAPTER, number, staged.content_hash, staged.path)
        await self._client.publish_adapter(version)
        await self._client.unload_adapter(_CANDIDATE)
        now_s = self._now()
        self.lessons.versions.append(
            Published(now_s, number, staged.content_hash, staged.path, updates)
        )
        fresh = sorted(taught - self._served)
        self.lessons.freshness_s += [now_s - self._arrived_s[pair] for pair in fresh]
        self._served |= taught


def score_requests(
    pair: EncodedPair, adapter: str | None, key: str
) -> tuple[ScoreRequest, ScoreRequest]:
    """Ask for the log-probabilities of both completions of `pair`; `key` makes the ids unique."""
    prompt = len(pair.prompt)
    return (
        ScoreRequest(f"chosen {key}", pair.prompt + pair.chosen, prompt, adapter),
        ScoreRequest(f"rejected {key}", pair.prompt + pair.rejected, prompt, adapter),
    )
