"""Plans that the device computes, and their results once it has.

Invariant: what a result holds was computed before the result is made, but for slices without a
time, and `result` waits for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.core.plan import (
    DrawResult,
    KeptLayers,
    LanePlan,
    ScoreResult,
    SliceResult,
    Span,
    StepResult,
    UpdateResult,
)
from tandem.executor.device import Mark
from tandem.executor.forward import Drawn, RunningBatch, SpanOutcome
from tandem.executor.shortage import lacks_memory, reason_of, relieve
from tandem.model.sampling import NOT_FINITE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningSlice:
    """Layers `[hi, lo)` of a recording that the device was given between two marks, or why they
    cannot be computed."""

    micro_batch: int
    hi: int
    lo: int
    problem: str | None
    began: Mark
    ended: Mark

    def result(self, *, timed: bool) -> SliceResult:
        """Waits for its end if it is to be `timed`."""
        seconds = self.began.seconds_until(self.ended) if timed else math.nan
        return SliceResult(self.micro_batch, self.hi, self.lo, seconds, self.problem)


@dataclass(slots=True)
class SubmittedPlan:
    """One plan between `submit` and `poll`.

    `passes` are those of the plan's spans, each with their places in the plan: one, or one a span
    if the pass failed as a whole. `outcomes` have the places of spans. `failed` has the reasons of
    sequences that were not computed. `inputs` are the tokens of a plan that follows. The slices of
    a plan that is `trailed` are computed while its result is used. `trailing` are such of plans
    before.
    """

    plan: LanePlan
    began: Mark
    passes: list[tuple[list[int], RunningBatch]] = field(default_factory=list)
    outcomes: dict[int, SpanOutcome] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    stopped: bool = False
    forwarded: Mark | None = None
    ended: Mark | None = None
    recording_s: float = 0.0  # time for recording a new kind of pass: it comes once
    inputs: Drawn | None = None
    kept: tuple[KeptLayers, ...] = ()
    slices: tuple[RunningSlice, ...] = ()
    updates: tuple[UpdateResult, ...] = ()
    trailed: bool = False
    trailing: tuple[RunningSlice, ...] = ()

    @property
    def computes_more(self) -> bool:
        """Whether taking the outcomes computes more than the sums and tokens on their way."""
        return any(
            (span.score_targets and span.score_top is not None)
            or any(draw.state or draw.sampling.logprobs is not None for draw in span.draws)
            for span in self.plan.spans
        )

    def take_outcomes(self) -> None:
        """Wait for the passes, and take what they left. An error is one of the pass's spans."""
        passes, self.passes = self.passes, []
        for places, running in passes:
            try:
                self.outcomes.update(zip(places, running.outcomes(), strict=True))
            except (RuntimeError, MemoryError, ValueError, IndexError) as error:
                logger.exception("what a pass computed cannot be read")
                for place in places:
                    charge(
                        self.failed, self.plan.spans[place], reason_of(error, "the forward pass")
                    )
                if lacks_memory(error):
                    relieve()

    def result(self, scrub: Callable[[Sequence[int]], None]) -> StepResult:
        """Wait for the device, and tell what it computed. `scrub` makes the KV of blocks harmless.

        Times are from the plan's beginning, on an idle device, to the end of the device's work:
        they are what the next plan of this kind will take. What the host does while it waits is not
        in them. A plan that follows begins at the end of the one before, if it was given by then,
        and so does one after trailing slices.
        """
        assert self.forwarded is not None and self.ended is not None
        ended = self.forwarded if self.trailed else self.ended
        ended.wait()
        self.take_outcomes()
        draws, scores = self._collect(self.outcomes, scrub)
        return StepResult(
            self.plan.step,
            self.plan.lane,
            max(0.0, self.began.seconds_until(ended) - self.recording_s),
            draws,
            scores,
            tuple(self.failed.items()),
            forward_s=max(0.0, self.began.seconds_until(self.forwarded) - self.recording_s),
            slices=tuple([each.result(timed=not self.trailed) for each in self.slices]),
            updates=self.updates,
            kept=self.kept,
            stopped=self.stopped,
            timed=tuple([each.result(timed=True) for each in self.trailing]),
        )

    def _collect(
        self, outcomes: dict[int, SpanOutcome], scrub: Callable[[Sequence[int]], None]
    ) -> tuple[tuple[DrawResult, ...], tuple[ScoreResult, ...]]:
        """Results in plan order. Spans that are not finite fail, and their KV is made harmless."""
        draws: list[DrawResult] = []
        scores: list[ScoreResult] = []
        for place, span in enumerate(self.plan.spans):
            outcome = outcomes.get(place)
            if outcome is None:
                continue
            if outcome.score_failed or NOT_FINITE in outcome.draws:
                scrub(span.block_tables[0])
                if span.draws or span.score_top is not None:
                    charge(self.failed, span, NOT_FINITE)
                else:  # nan is the answer to a score on its own
                    scores.append(ScoreResult(span.seq_id, span.start, (), math.nan))
                continue
            for draw, drawn in zip(span.draws, outcome.draws, strict=True):
                if isinstance(drawn, str):
                    self.failed[draw.seq_id] = drawn
                else:
                    draws.append(drawn)
            if outcome.score is not None:
                scores.append(outcome.score)
        return tuple(draws), tuple(scores)


def charge(failed: dict[int, str], span: Span, reason: str) -> None:
    """Mark a span's own sequence, and those that draw from its last row, as failed."""
    for seq_id in (span.seq_id, *(draw.seq_id for draw in span.draws)):
        failed[seq_id] = reason
