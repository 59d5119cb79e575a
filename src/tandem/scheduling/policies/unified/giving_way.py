"""How long a pass that gives way may be: as long as the requests that come leave time for.

A pass that was cut off is lost. After one that was, the next are at most half as long; after each
that ended, longer again: so about one in five is, whatever the load. Knows plans and results only.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.plan import StepPlan, StepResult
from tandem.scheduling.view import View

_AFTER_LOSS = 0.5
_AFTER_END = 1.2


@dataclass(frozen=True, slots=True)
class _Given:
    """What was decided last: the plan before it, its pass in predicted seconds, and what of it had
    been earned."""

    after: StepPlan | None
    pass_s: float
    spent_s: float


class GivingWay:
    """`pass_s` is the longest pass that may give way, at most `longest_s`; `lost` says whether the
    last one was."""

    def __init__(self, longest_s: float) -> None:
        self.pass_s = longest_s
        self.lost = False
        self._longest_s = longest_s
        self._given: _Given | None = None

    def give(self, view: View, pass_s: float, spent_s: float) -> None:
        """A plan that gives way was decided; 0 seconds if it has no pass."""
        self._given = _Given(view.last_plan, pass_s, spent_s)

    def judge(self, view: View) -> float:
        """Learn from what came of it; how much of what was spent is to be given back."""
        given, self._given, self.lost = self._given, None, False
        if given is None:
            return 0.0
        plan, results = view.last_plan, view.last_results
        if plan is None or plan is given.after:  # nothing of it was admitted
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
