"""A training step as work left: sequences to forward, layers to go back, one update.

State and its transitions only; `learning` decides when they happen, policies read it through the
view. Invariant: a micro-batch is open from its first forward to its last layer, and owes layers
only once all its sequences are scored.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.errors import InvalidRequest
from tandem.core.plan import UpdateResult
from tandem.core.sequence import Sequence
from tandem.core.training import Role, StepOutcome, TrainingSequence, TrainingStep
from tandem.estimators.work import BackwardWork
from tandem.training.losses import step_items


@dataclass(frozen=True, slots=True)
class LearningLimits:
    """What can be trained at all: layers of the model, rows that may be recorded at once (0: no
    training), tokens of one sequence, tokens of KV."""

    num_layers: int = 0
    recording_tokens: int = 0
    max_model_len: int = 0
    cache_tokens: int = 0

    def check_step(self, step: TrainingStep) -> int:
        """Items of a step that can run here. Raises `InvalidRequest` that says why it cannot."""
        if self.recording_tokens == 0:
            raise InvalidRequest("this engine has no room for recordings, so it cannot train")
        items = step_items(step.loss, step.micro_batches)
        if items == 0:
            raise InvalidRequest("the step holds nothing to learn from", param="micro_batches")
        for place, sequences in enumerate(step.micro_batches):
            rows = MicroBatchWork.of(0, sequences, self.num_layers).rows
            if rows > self.recording_tokens:
                raise InvalidRequest(
                    f"micro-batch {place} has {rows} rows, but the engine can record "
                    f"{self.recording_tokens} at once; make micro-batches smaller or raise "
                    "learning.recording_tokens",
                    param="micro_batches",
                )
            for sequence in sequences:
                self.check_length(len(sequence.tokens))
        return items

    def check_length(self, num_tokens: int) -> None:
        """Raises `InvalidRequest` if a sequence of so many tokens can never be forwarded."""
        if num_tokens > min(self.max_model_len, self.cache_tokens + 1):
            raise InvalidRequest(
                f"a sequence has {num_tokens} tokens, but the context is {self.max_model_len} "
                f"tokens and the KV cache holds {self.cache_tokens}; shorten it",
                param="tokens",
                code="context_length_exceeded",
            )


class Stage(StrEnum):
    """What a step waits for next. Later micro-batches may still be forwarded while earlier ones
    owe layers: that is `FORWARD`, with `layers_left` above 0."""

    QUEUED = "queued"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(slots=True, eq=False)
class MicroBatchWork:
    """One micro-batch of a step.

    `gradients` are the places of the sequences that are recorded: KTO's mismatched ones are scored
    only. `lengths` are the rows to record, a number for each recorded sequence.
    `layers_left` counts from the top and is the number of layers until backward begins; `backward`
    is what it works on.
    """

    number: int
    sequences: tuple[TrainingSequence, ...]
    layers_left: int
    gradients: tuple[int, ...]
    lengths: tuple[int, ...]
    logprobs: list[float | None]
    backward: BackwardWork
    opened: bool = False
    coefficients: tuple[float, ...] | None = None
    loss: float = 0.0

    @staticmethod
    def of(number: int, sequences: tuple[TrainingSequence, ...], layers: int) -> MicroBatchWork:
        """A micro-batch of which nothing is done yet."""
        gradients = tuple(
            place for place, seq in enumerate(sequences) if seq.role is not Role.MISMATCHED
        )
        lengths = tuple(len(sequences[place].tokens) - 1 for place in gradients)
        return MicroBatchWork(
            number,
            sequences,
            layers if gradients else 0,
            gradients,
            lengths,
            [None] * len(sequences),
            BackwardWork(sum(lengths)),
        )

    @property
    def rows(self) -> int:
        """All rows to record."""
        return self.backward.rows

    @property
    def scored(self) -> bool:
        """Whether backward may begin."""
        return self.coefficients is not None


@dataclass(slots=True, eq=False)
class StepWork:
    """A training step on its way. Policies read it; times in seconds on the engine's clock.

    `sequences` are those that are not scored yet, in order. `revision` is the trainer's, known once
    the step has begun. `last_loss` is the mean loss of the trainer's step before (None: unknown).
    """

    step: TrainingStep
    arrival_s: float
    items: int
    micro_batches: list[MicroBatchWork] = field(default_factory=list)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    revision: int = 0
    begun: bool = False
    started_s: float | None = None
    last_loss: float | None = None

    @property
    def step_id(self) -> str:
        """The step's own id."""
        return self.step.step_id

    @property
    def trainer(self) -> str:
        """Whose step it is."""
        return self.step.trainer

    @property
    def urgency(self) -> float:
        """What MACE's priority adds: the loss of its samples as far as it is known."""
        return self.step.urgency

    @property
    def stage(self) -> Stage:
        """See `Stage`."""
        if not self.begun:
            return Stage.QUEUED
        if self.sequences:
            return Stage.FORWARD
        return Stage.BACKWARD if self.layers_left else Stage.UPDATE

    @property
    def tokens_left(self) -> int:
        """Rows still to be forwarded once the step has begun."""
        return sum(seq.remaining for seq in self.sequences.values())

    @property
    def layers_left(self) -> int:
        """Layers that its scored micro-batches owe."""
        return sum(batch.layers_left for batch in self.micro_batches if batch.scored)

    @property
    def updatable(self) -> bool:
        """Whether nothing but the update is left."""
        return self.begun and not self.sequences and not self.layers_left

    def owed(self) -> list[MicroBatchWork]:
        """Micro-batches whose layers may be computed now, in order."""
        return [batch for batch in self.micro_batches if batch.layers_left and batch.scored]

    def outcome(self, update: UpdateResult, loss: float, now: float) -> StepOutcome:
        """How the step ended; log-probabilities that were never known are nan."""
        logprobs = tuple(
            tuple(math.nan if value is None else value for value in batch.logprobs)
            for batch in self.micro_batches
        )
        return StepOutcome(
            step_id=self.step_id,
            trainer=self.trainer,
            revision=update.revision,
            applied=update.applied,
            loss=loss,
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            logprobs=logprobs,
            arrival_s=self.arrival_s,
            started_s=self.arrival_s if self.started_s is None else self.started_s,
            finished_s=now,
            problem=update.problem,
        )


@dataclass(slots=True, eq=False)
class TrainerWork:
    """A trainer that is open: its revision and the steps that wait for it, the first one begun."""

    name: str
    revision: int
    steps: deque[StepWork] = field(default_factory=deque)
    last_loss: float | None = None


@dataclass(slots=True)
class LearningCounters:
    """Totals since the start: steps whose update was made, and the rows of those steps."""

    steps: int = 0
    tokens: int = 0
