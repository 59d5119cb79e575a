"""What an executor did, plan by plan: for plots, and to tell whether two runs were the same.

A listener for `SimExecutor.on_plan`. Invariant: `digest` depends on every plan's shape, on how
much of it was done, on their order and on nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from tandem.core.plan import LanePlan, StepResult
from tandem.estimators.work import PassWork


@dataclass(frozen=True, slots=True)
class Moment:
    """One iteration: when it ended and how long it took, its rows by kind, layers gone back."""

    end_s: float
    seconds: float
    decodes: int
    prefill: int
    training: int
    layers: int
    updates: int


class Timeline:
    """Moments and the digest so far; `now` is asked when a plan has ended."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.moments: list[Moment] = []
        self.digest = 0

    def __call__(self, plan: LanePlan, result: StepResult) -> None:
        """Take one plan."""
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
        shape = [(span.seq_id, span.start, len(span.tokens)) for span in plan.spans]
        backward = [(piece.micro_batch, piece.hi, piece.lo) for piece in result.slices]
        told = repr((shape, backward, result.stopped))
        self.digest = zlib.crc32(told.encode(), self.digest)
