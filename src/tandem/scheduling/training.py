"""A training step as remaining work: sequences to forward, layers to go back through, one update.

Holds state and its transitions only. `learning` decides when they happen; policies read the state
through the view. Invariant: a recording is open from the first forward of its micro-batch until its
last layer is done. It owes layers only once all sequences of the micro-batch are scored.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.errors import InvalidRequest
from tandem.core.plan import BackwardSlice, RecordTarget, UpdateResult
from tandem.core.sequence import Sequence
from tandem.core.training import Role, StepOutcome, TrainingSequence, TrainingStep
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import BackwardWork
from tandem.training.losses import step_items

# A new request waits for one layer of one recording. That layer takes at most this share of the
# TTFT objective, unless the recording has only this few rows or only one sequence.
_GRAIN_SHARE = 0.1
_LEAST_ROWS = 128


def recording_rows(latency: LatencyModel, ttft_slo_s: float) -> int:
    """Most rows of one recording, so that requests of this objective can wait for a layer."""
    return max(_LEAST_ROWS, latency.recording_rows_within(_GRAIN_SHARE * ttft_slo_s))


@dataclass(frozen=True, slots=True)
class LearningLimits:
    """What can be trained at all."""

    num_layers: int = 0  # of the model
    recording_tokens: int = 0  # rows that can be recorded at once; 0: no training
    max_model_len: int = 0  # most tokens of one sequence
    cache_tokens: int = 0  # tokens that the whole KV cache holds

    def check_step(self, step: TrainingStep) -> int:
        """Number of items of a step. Raises `InvalidRequest` if the step can never run here."""
        if self.recording_tokens == 0:
            raise InvalidRequest("this engine has no room for recordings, so it cannot train")
        items = step_items(step.loss, step.micro_batches)
        if items == 0:
            raise InvalidRequest("the step holds nothing to learn from", param="micro_batches")
        for place, sequences in enumerate(step.micro_batches):
            rows = sum(sequences[each].rows for each in recorded_places(sequences))
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
        """Raise `InvalidRequest` if a sequence of this many tokens can never be forwarded."""
        if num_tokens > min(self.max_model_len, self.cache_tokens + 1):
            raise InvalidRequest(
                f"a sequence has {num_tokens} tokens, but the context is {self.max_model_len} "
                f"tokens and the KV cache holds {self.cache_tokens}; shorten it",
                param="tokens",
                code="context_length_exceeded",
            )


class Stage(StrEnum):
    """What a step waits for next. A step in `FORWARD` may have `layers_left` above 0: later
    micro-batches are forwarded while earlier ones owe layers."""

    QUEUED = "queued"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(slots=True, eq=False)
class RecordingWork:
    """Sequences of a micro-batch that are recorded and differentiated together."""

    number: int
    places: tuple[int, ...]  # of its sequences in the micro-batch
    lengths: tuple[int, ...]  # rows to record, per sequence
    layers_left: int  # counted from the top
    backward: BackwardWork
    coefficients: tuple[float, ...] | None = None  # known once the micro-batch is scored

    @property
    def rows(self) -> int:
        """All rows to record."""
        return self.backward.rows


@dataclass(slots=True, eq=False)
class MicroBatchWork:
    """One micro-batch of a step: its sequences, their log-probabilities and the loss.

    `recordings` hold only the sequences that have a gradient. KTO's mismatched ones are scored
    only.
    """

    sequences: tuple[TrainingSequence, ...]
    recordings: tuple[RecordingWork, ...]
    logprobs: list[float | None]
    opened: bool = False
    scored: bool = False
    loss: float = 0.0

    @staticmethod
    def of(
        numbers: Iterator[int], sequences: tuple[TrainingSequence, ...], layers: int, most_rows: int
    ) -> MicroBatchWork:
        """A micro-batch with all its work left. Its recordings have at most `most_rows` rows,
        except for a recording of one longer sequence."""
        groups: list[list[int]] = []
        rows = 0
        for place in recorded_places(sequences):
            if not groups or rows + sequences[place].rows > most_rows:
                groups.append([])
                rows = 0
            groups[-1].append(place)
            rows += sequences[place].rows
        recordings = []
        for group in groups:
            lengths = tuple([sequences[place].rows for place in group])
            work = BackwardWork.of(lengths)
            recordings.append(RecordingWork(next(numbers), tuple(group), lengths, layers, work))
        return MicroBatchWork(sequences, tuple(recordings), [None] * len(sequences))

    @property
    def rows(self) -> int:
        """All rows to record."""
        return sum([each.rows for each in self.recordings])

    def targets(self) -> dict[int, RecordTarget]:
        """Where each sequence that has a gradient is recorded, by its place."""
        return {
            place: RecordTarget(each.number, at)
            for each in self.recordings
            for at, place in enumerate(each.places)
        }

    def take_coefficients(self, loss: float, coefficients: tuple[float, ...]) -> None:
        """All sequences are scored, so backward may begin."""
        self.scored, self.loss = True, loss
        for each in self.recordings:
            each.coefficients = tuple([coefficients[place] for place in each.places])


@dataclass(slots=True, eq=False)
class StepWork:
    """A training step in progress. Policies read it. Times are seconds on the engine's clock."""

    step: TrainingStep
    arrival_s: float
    items: int
    micro_batches: list[MicroBatchWork] = field(default_factory=list)
    # not scored yet, in order, by seq id
    sequences: dict[int, Sequence] = field(default_factory=dict)
    begun: bool = False
    started_s: float | None = None
    last_loss: float | None = None  # mean loss of the trainer's previous step; None: unknown

    @property
    def step_id(self) -> str:
        """Id of the step."""
        return self.step.step_id

    @property
    def trainer(self) -> str:
        """Name of the trainer that the step belongs to."""
        return self.step.trainer

    @property
    def urgency(self) -> float:
        """The urgency in MACE's priority: the loss of the step's samples, as far as known."""
        return self.step.urgency

    @property
    def stage(self) -> Stage:
        """What the step waits for next."""
        if not self.begun:
            return Stage.QUEUED
        if self.sequences:
            return Stage.FORWARD
        return Stage.BACKWARD if self.layers_left else Stage.UPDATE

    @property
    def tokens_left(self) -> int:
        """Rows still to forward, once the step has begun."""
        return sum(seq.remaining for seq in self.sequences.values())

    @property
    def layers_left(self) -> int:
        """Layers that its scored micro-batches owe."""
        return sum([each.layers_left for each in self.owed()])

    @property
    def updatable(self) -> bool:
        """Whether only the update is left."""
        return self.begun and not self.sequences and not self.layers_left

    @property
    def due(self) -> bool:
        """Whether some of its layers, or its update, may be computed now."""
        return self.started_s is not None and (bool(self.owed()) or self.updatable)

    @property
    def recordings(self) -> list[RecordingWork]:
        """Recordings of all its micro-batches, in order."""
        return [each for batch in self.micro_batches for each in batch.recordings]

    def begin(
        self, last_loss: float | None, numbers: Iterator[int], layers: int, most_rows: int
    ) -> None:
        """Make its forwards ready to run. `numbers` gives the recordings their numbers; `most_rows`
        is as in `MicroBatchWork.of`."""
        self.begun, self.last_loss = True, last_loss
        self.micro_batches = [
            MicroBatchWork.of(numbers, sequences, layers, most_rows)
            for sequences in self.step.micro_batches
        ]

    def micro_batch_of(self, record: RecordTarget) -> MicroBatchWork:
        """The micro-batch that has this recording."""
        return next(
            batch
            for batch in self.micro_batches
            if any(each.number == record.micro_batch for each in batch.recordings)
        )

    def owed(self) -> list[RecordingWork]:
        """Recordings whose layers may be computed now, in order."""
        return [
            each
            for batch in self.micro_batches
            if batch.scored
            for each in batch.recordings
            if each.layers_left
        ]

    def slices(self, max_layers: int | None) -> list[BackwardSlice]:
        """Up to `max_layers` layers, over its scored recordings in order."""
        left = self.layers_left if max_layers is None else max_layers
        granted: list[BackwardSlice] = []
        for each in self.owed():
            if left <= 0:
                break
            layers = min(left, each.layers_left)
            left -= layers
            assert each.coefficients is not None
            lo = each.layers_left - layers
            granted.append(BackwardSlice(each.number, each.layers_left, lo, each.coefficients))
        return granted

    def outcome(self, update: UpdateResult, loss: float, now: float) -> StepOutcome:
        """How the step ended. Log-probabilities that are unknown are nan."""
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
    """An open trainer: its revision and its queued steps, of which only the first has begun."""

    name: str
    revision: int
    steps: deque[StepWork] = field(default_factory=deque)
    last_loss: float | None = None


@dataclass(slots=True)
class LearningCounters:
    """Totals since the start: steps whose update was applied, and the tokens of those steps."""

    steps: int = 0
    tokens: int = 0


def recorded_places(sequences: tuple[TrainingSequence, ...]) -> list[int]:
    """Places of the sequences of a micro-batch that have a gradient."""
    return [place for place, seq in enumerate(sequences) if seq.role is not Role.MISMATCHED]
