"""How long a preemptible pass may be: as long as the requests that come leave time for.

A pass that was preempted is lost. After a lost pass the next ones are at most half as long; after a
completed pass they may be a fifth longer. So about one in five is lost, whatever the load. Knows
plans and results only.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.plan import StepPlan, StepResult
from tandem.scheduling.view import View

_AFTER_LOSS = 0.5
_AFTER_END = 1.2


@dataclass(frozen=True, slots=True)
class _Given:
    """The last preemptible plan that was decided."""

    after: StepPlan | None  # the plan before it
    pass_s: float  # predicted seconds of its pass
    spent_s: float  # earned seconds that it used


class GivingWay:
    """`pass_s` is the longest preemptible pass in seconds, at most `longest_s`. `lost` says whether
    the last one was lost."""

    def __init__(self, longest_s: float) -> None:
        self.pass_s = longest_s
        self.lost = False
        self._longest_s = longest_s
        self._given: _Given | None = None

    def give(self, view: View, pass_s: float, spent_s: float) -> None:
        """A preemptible plan was decided. `pass_s` is 0 if it has no pass."""
        self._given = _Given(view.last_plan, pass_s, spent_s)

    def judge(self, view: View) -> float:
        """Learn from the result of the last one; returns the earned seconds to give back."""
        given, self._given, self.lost = self._given, None, False
        if given is None:
            return 0.0
        plan, results = view.last_plan, view.last_results
        if plan is None or plan is given.after:  # none of it was admitted
            return given.spent_s
        self.lost = any(result.stopped for result in results)
        if self.lost:
            self.pass_s = _AFTER_LOSS * given.pass_s
        else:
            self.pass_s = min(max(self.pass_s, _AFTER_END * given.pass_s), self._longest_s)
        return 0.0 if _all_done(plan, results) else given.spent_s


def _all_done(plan: StepPlan, results: tuple[StepResult, ...]) -> bool:
    if any(result.stopped for result in results):
        return False
    wanted = sum([piece.hi - piece.lo for lane in plan.lanes for piece in lane.slices])
    done = sum([piece.hi - piece.lo for result in results for piece in result.slices])
    updates = sum([len(lane.updates) for lane in plan.lanes])
    return done == wanted and updates == sum([len(result.updates) for result in results])
