"""What an executor did, plan by plan: for plots, and to tell whether two runs were the same.

A listener for `SimExecutor.on_plan`. Invariant: `digest` depends on everything that was decided,
how much of it was done, and the order. It does not depend on tokens and coefficients, which the
executor computes, nor on times.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tandem.core.plan import LanePlan, StepResult
from tandem.estimators.work import PassWork


@dataclass(frozen=True, slots=True)
class Moment:
    """One iteration."""

    end_s: float  # time at its end
    seconds: float  # its duration
    decodes: int  # rows
    prefill: int  # rows
    training: int  # rows
    layers: int  # of backward slices
    updates: int


class Timeline:
    """Moments and the digest so far. `now` is called when a plan has ended."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.moments: list[Moment] = []
        self.digest = 0

    def __call__(self, plan: LanePlan, result: StepResult) -> None:
        """Add one plan."""
        work = PassWork() if result.stopped else PassWork.of(plan)
        layers = sum(piece.hi - piece.lo for piece in result.slices)
        self.moments.append(
            Moment(
                self._now(),
                result.elapsed_s,
                work.decodes,
                work.rows - work.recorded,
                work.recorded,
                layers,
                len(result.updates),
            )
        )
        told = msgspec.msgpack.encode((_decided(plan), _done(result)))
        self.digest = zlib.crc32(told, self.digest)


def _decided(plan: LanePlan) -> tuple[object, ...]:
    spans = [
        (
            span.seq_id,
            span.start,
            len(span.tokens),
            span.block_tables,
            span.adapter,
            [(draw.seq_id, draw.index, draw.position) for draw in span.draws],
            len(span.score_targets),
            span.score_top,
            span.record,
        )
        for span in plan.spans
    ]
    slices = [(piece.micro_batch, piece.hi, piece.lo) for piece in plan.slices]
    rest = (plan.copies, plan.discards, plan.opens, plan.updates, plan.share, plan.preemptible)
    return plan.step, plan.lane, spans, slices, rest


def _done(result: StepResult) -> tuple[object, ...]:
    slices = [(piece.micro_batch, piece.hi, piece.lo) for piece in result.slices]
    updates = [(update.trainer, update.revision, update.applied) for update in result.updates]
    return result.stopped, slices, updates
