"""Keeps trainers, their steps, and scores: begins them, counts their work, ends them.

Turns executor results into the work that is left next, and into outcomes. The policy chooses which
work runs; `admission` checks that it fits. Invariants: at most `recording_tokens` rows are open. A
step is forwarded only after the update of its trainer's previous step. No update runs while a score
under the trainer's parameters has begun and not ended.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from tandem.core.errors import InvalidRequest, NotFound
from tandem.core.plan import (
    BackwardSlice,
    Discard,
    KeptLayers,
    OpenMicroBatch,
    ScoreResult,
    SliceResult,
    Span,
    Update,
    UpdateResult,
)
from tandem.core.sequence import Sequence
from tandem.core.training import Score, ScoreRequest, StepOutcome, TrainerState, TrainingStep
from tandem.core.version import AdapterVersion
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import BackwardWork
from tandem.kv.cache import KVCache
from tandem.scheduling.scores import ScoreFailed, Scores
from tandem.scheduling.scoring import enter, leave, training_sequence
from tandem.scheduling.state import SchedulerState
from tandem.scheduling.training import (
    LearningCounters,
    LearningLimits,
    MicroBatchWork,
    RecordingWork,
    StepWork,
    TrainerWork,
    recording_rows,
)
from tandem.training.losses import micro_batch_loss

Learned = StepOutcome | Score | ScoreFailed


@dataclass(slots=True)
class _Books:
    """Everything in progress."""

    trainers: dict[str, TrainerWork] = field(default_factory=dict)
    steps: dict[str, StepWork] = field(default_factory=dict)
    heads: list[StepWork] = field(default_factory=list)  # first step of each trainer, oldest first
    open: dict[int, tuple[StepWork, RecordingWork]] = field(default_factory=dict)
    discards: list[Discard] = field(default_factory=list)
    ended: list[Learned] = field(default_factory=list)


class Learning:
    """Owned by the scheduler. Changes only between iterations and when results are applied."""

    def __init__(
        self,
        state: SchedulerState,
        cache: KVCache,
        seq_ids: Iterator[int],
        limits: LearningLimits,
        latency: LatencyModel | None,
    ) -> None:
        """With a `latency`, recordings are so small that a request can wait for a layer of one."""
        self._state = state
        self._cache = cache
        self._seq_ids = seq_ids
        self._limits = limits
        self._latency = latency
        self._numbers = count()
        self._books = _Books()
        self.scores = Scores(state, cache)
        self._places: dict[int, tuple[StepWork, MicroBatchWork, int]] = {}
        self._recorded_rows = 0
        self.counters = LearningCounters()

    # ------------------------------------------------------------------ for policies

    @property
    def heads(self) -> list[StepWork]:
        """The step of each trainer that may run now, oldest first."""
        return self._books.heads

    @property
    def queued(self) -> list[str]:
        """Ids of all steps that have not ended, in order of arrival."""
        return list(self._books.steps)

    @property
    def recording_room(self) -> int:
        """Rows that can be recorded beside the open recordings."""
        return self._limits.recording_tokens - self._recorded_rows

    # ------------------------------------------------------------------ commands

    def open_trainer(self, state: TrainerState) -> None:
        """The executor has opened this trainer. A previous one of the same name was closed."""
        assert state.name not in self._books.trainers
        self._books.trainers[state.name] = TrainerWork(state.name, state.revision)

    def close_trainer(self, name: str) -> list[str]:
        """Forget a trainer and its steps; returns the steps' ids. The executor clears its part."""
        if name not in self._books.trainers:
            return []
        cancelled = self._clear(name)
        del self._books.trainers[name]
        self._books.discards = [d for d in self._books.discards if d.trainer != name]
        for seq in self.scores.under(name):
            self._books.ended.append(self.scores.fail(seq, f"trainer {name} was closed"))
        return cancelled

    def add_step(self, step: TrainingStep, now: float) -> None:
        """Queue a step behind the trainer's others. Raises `InvalidRequest` if it can never run."""
        trainer = self._require_trainer(step.trainer)
        if step.step_id in self._books.steps:
            raise InvalidRequest(f"step id {step.step_id!r} is in use", param="step_id")
        items = self._limits.check_step(step)
        work = StepWork(step, now, items)
        self._books.steps[step.step_id] = work
        trainer.steps.append(work)
        self._begin(trainer)

    def cancel_steps(self, name: str) -> list[str]:
        """Cancel all steps of a trainer; returns their ids. The next plan discards their rows."""
        return self._clear(name) if name in self._books.trainers else []

    def add_score(self, request: ScoreRequest, version: AdapterVersion | None, now: float) -> None:
        """Queue a score; `version` is its adapter's, pinned. Raises `InvalidRequest`."""
        if request.trainer is not None:
            self._require_trainer(request.trainer)
        self._limits.check_length(len(request.tokens))
        self.scores.add(next(self._seq_ids), request, version, now)

    def take_ended(self) -> list[Learned]:
        """What has ended since the last call."""
        ended, self._books.ended = self._books.ended, []
        return ended

    # ------------------------------------------------------------------ planning

    @property
    def has_work(self) -> bool:
        """Whether a step is queued, runs or is to be discarded. Scores count as sequences."""
        return bool(self._books.steps or self._books.discards)

    def backward_of(self, micro_batch: int) -> BackwardWork | None:
        """The backward work of an open recording; None if it is not open."""
        opened = self._books.open.get(micro_batch)
        return opened[1].backward if opened is not None else None

    def take_discards(self) -> tuple[Discard, ...]:
        """Discards for the plan that is being made."""
        discards, self._books.discards = tuple(self._books.discards), []
        return discards

    def opens(self, seq: Sequence) -> bool:
        """Whether starting this sequence opens a recording."""
        scoring = seq.scoring
        assert scoring is not None
        return scoring.record is not None and not self._places[seq.seq_id][1].opened

    def may_start(self, seq: Sequence) -> bool:
        """Whether a waiting sequence may start. A recording has to fit. A score has to wait while
        its trainer's update is next."""
        scoring = seq.scoring
        assert scoring is not None
        if scoring.record is not None:
            _, batch, _ = self._places[seq.seq_id]
            return batch.opened or batch.rows <= self.recording_room
        if scoring.trainer is None or scoring.step_id is not None:
            return True
        trainer = self._books.trainers[scoring.trainer]
        return not (trainer.steps and trainer.steps[0].updatable)

    def started(self, seq: Sequence, now: float) -> list[OpenMicroBatch]:
        """A sequence got its blocks. Returns what to open if it is the first of its micro-batch."""
        scoring = seq.scoring
        assert scoring is not None
        if scoring.step_id is None:
            return []
        work = self._books.steps[scoring.step_id]
        if work.started_s is None:
            work.started_s = now
        if scoring.record is None:
            return []
        _, batch, _ = self._places[seq.seq_id]
        if batch.opened:
            return []
        batch.opened = True
        self._books.open |= {each.number: (work, each) for each in batch.recordings}
        self._recorded_rows += batch.rows
        revision = self._books.trainers[work.trainer].revision
        return [
            OpenMicroBatch(each.number, work.trainer, revision, each.lengths)
            for each in batch.recordings
        ]

    def preempted(self, seq: Sequence) -> None:
        """A sequence lost its KV. Its recorded rows stay recorded and are only forwarded again. A
        score under working parameters restarts."""
        if seq.scoring is not None and seq.scoring.step_id is None:
            self.scores.preempted(seq)

    def slices(self, step_id: str, max_layers: int | None) -> list[BackwardSlice]:
        """`StepWork.slices` of a step; empty if the step has ended."""
        work = self._books.steps.get(step_id)
        return work.slices(max_layers) if work is not None else []

    def update(self, step_id: str, ending: set[int]) -> Update | None:
        """The update of a step, or None if the step has other work left.

        `ending` are the sequences that this plan finishes. The update waits for a score under the
        trainer's parameters that has begun and is not among them.
        """
        work = self._books.steps.get(step_id)
        if work is None or not work.updatable:
            return None
        if self.scores.holds_update(work.trainer, ending):
            return None
        revision = self._books.trainers[work.trainer].revision
        return Update(work.trainer, revision, work.step.scale)

    # ------------------------------------------------------------------ results

    def take_span(
        self, seq: Sequence, span: Span, score: ScoreResult | None, problem: str | None, now: float
    ) -> None:
        """A span of a sequence was forwarded, or failed with `problem`."""
        scoring = seq.scoring
        assert scoring is not None
        if problem is None and any(target >= 0 for target in span.score_targets):
            total = math.nan if score is None else score.total
            if not math.isfinite(total) and scoring.step_id is None:
                self._books.ended.append(self.scores.finish_not_finite(seq))
                return
            if not math.isfinite(total):
                problem = "the log-probability is not a finite number"
            scoring.total += total
        if problem is not None:
            self._fail_sequence(seq, problem, now)
            return
        seq.computed = span.end
        seq.scored = max(seq.scored, span.end + 1)
        if scoring.record is not None:
            scoring.recorded = max(scoring.recorded, span.end)
        self._cache.commit(seq)
        if seq.remaining == 0:
            self._finish_sequence(seq, now)

    def take_kept(self, kept: KeptLayers) -> None:
        """A pass recorded rows of a micro-batch."""
        if kept.micro_batch in self._books.open:
            recording = self._books.open[kept.micro_batch][1]
            recording.backward = recording.backward.with_kept(kept)

    def take_slice(self, result: SliceResult, now: float) -> None:
        """Layers of a recording were computed."""
        if result.micro_batch not in self._books.open:
            return  # its step failed in this iteration
        work, recording = self._books.open[result.micro_batch]
        if result.problem is not None:
            self._fail_step(work, result.problem, now)
            return
        recording.layers_left, recording.backward = result.lo, recording.backward.after_slice()
        if recording.layers_left == 0:
            self._close(recording)

    def take_update(self, result: UpdateResult, now: float) -> None:
        """A trainer was updated, or its update was skipped. Either way the step has ended."""
        trainer = self._books.trainers[result.trainer]
        trainer.revision = result.revision
        work = trainer.steps[0]
        assert work.updatable
        loss = math.fsum(batch.loss for batch in work.micro_batches)
        if result.applied:
            trainer.last_loss = loss
            self.counters.steps += 1
            self.counters.tokens += work.step.num_tokens
        else:
            self._books.discards.append(Discard(work.trainer, ()))
        self._end_step(work, work.outcome(result, loss, now))

    # ------------------------------------------------------------------ inside

    def _begin(self, trainer: TrainerWork) -> None:
        """Begin the first step of a trainer, unless it has begun."""
        if not trainer.steps or trainer.steps[0].begun:
            return
        work = trainer.steps[0]
        rows = self._limits.recording_tokens
        if self._latency is not None:
            rows = recording_rows(self._latency, self._state.ttft_slo_s)
        work.begin(trainer.last_loss, self._numbers, self._limits.num_layers, rows)
        insort(self._books.heads, work, key=lambda head: (head.arrival_s, head.step_id))
        for place, batch in enumerate(work.micro_batches):
            records = batch.targets()
            for index, source in enumerate(batch.sequences):
                seq = training_sequence(
                    next(self._seq_ids),
                    (work.step_id, trainer.name),
                    source,
                    (place, index),
                    records.get(index),
                    work.arrival_s,
                )
                work.sequences[seq.seq_id] = seq
                self._places[seq.seq_id] = (work, batch, index)
                enter(seq, self._state, self._cache)

    def _finish_sequence(self, seq: Sequence, now: float) -> None:
        """All rows are forwarded. The sum is known, and the KV is not needed again."""
        scoring = seq.scoring
        assert scoring is not None
        if scoring.step_id is None:
            self._books.ended.append(self.scores.finish(seq))
            return
        work, batch, index = self._places[seq.seq_id]
        batch.logprobs[index] = scoring.total
        del work.sequences[seq.seq_id], self._places[seq.seq_id]
        leave(seq, self._state, self._cache)
        known = [value for value in batch.logprobs if value is not None]
        if len(known) < len(batch.sequences):
            return
        share = micro_batch_loss(work.step.loss, batch.sequences, known, work.items)
        if not all(math.isfinite(value) for value in (share.loss, *share.coefficients)):
            self._fail_step(work, "the loss is not a finite number", now)
            return
        batch.take_coefficients(share.loss, share.coefficients)

    def _fail_sequence(self, seq: Sequence, problem: str, now: float) -> None:
        if seq.request.request_id in self.scores:
            self._books.ended.append(self.scores.fail(seq, problem))
            return
        self._fail_step(self._places[seq.seq_id][0], problem, now)

    def _fail_step(self, work: StepWork, problem: str, now: float) -> None:
        """End a step without its update, and discard its recordings."""
        self._discard(work)
        revision = self._books.trainers[work.trainer].revision
        nothing = UpdateResult(work.trainer, revision, False, math.nan, math.nan, 0.0, problem)
        self._end_step(work, work.outcome(nothing, math.nan, now))

    def _end_step(self, work: StepWork, outcome: StepOutcome) -> None:
        self._forget(work)
        self._books.ended.append(outcome)
        self._begin(self._books.trainers[work.trainer])

    def _clear(self, name: str) -> list[str]:
        """Cancel all steps of a trainer; returns their ids."""
        trainer = self._books.trainers[name]
        cancelled = []
        for work in list(trainer.steps):
            self._discard(work)
            self._forget(work)
            cancelled.append(work.step_id)
        return cancelled

    def _discard(self, work: StepWork) -> None:
        """Have the executor drop what a step has recorded and accumulated."""
        if any(batch.opened for batch in work.micro_batches):
            numbers = tuple(
                each.number for each in work.recordings if each.number in self._books.open
            )
            self._books.discards.append(Discard(work.trainer, numbers))

    def _forget(self, work: StepWork) -> None:
        for seq in work.sequences.values():
            del self._places[seq.seq_id]
            leave(seq, self._state, self._cache)
        work.sequences.clear()
        for recording in work.recordings:
            self._close(recording)
        del self._books.steps[work.step_id]
        if work.begun:
            self._books.heads.remove(work)
        self._books.trainers[work.trainer].steps.remove(work)

    def _close(self, recording: RecordingWork) -> None:
        """Free a recording's rows. The executor has dropped it, or will before it opens another."""
        if self._books.open.pop(recording.number, None) is not None:
            self._recorded_rows -= recording.rows

    def _require_trainer(self, name: str) -> TrainerWork:
        trainer = self._books.trainers.get(name)
        if trainer is None:
            raise NotFound(f"there is no trainer {name!r}; open it first", param="trainer")
        return trainer
