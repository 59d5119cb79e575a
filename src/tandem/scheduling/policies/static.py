"""A fixed share of the device's time for training, whatever requests need (Harli's `static`).

Iterations take turns: training runs alone whenever it has had less than its share of the time so
far, requests otherwise. With nothing on one side, the other has all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.decision import Decision
from tandem.scheduling.policies.adainf import train
from tandem.scheduling.policies.no_retrain import serve
from tandem.scheduling.view import Policy, View

# What was had longer ago than this counts for less and less: an idle hour is no credit.
_MEMORY_S = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """`share` of the time is training's (Harli's `static` gives it 40%); `slice_s` bounds an
    iteration of training."""

    share: float = 0.4
    slice_s: float = 0.1

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0 or self.slice_s <= 0.0:
            raise ValueError("share must be above 0 and below 1, slice_s above 0")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return FixedShare(options)


class FixedShare:
    """Remembers what each side has had lately."""

    decodes_alike = False
    records_in_parts = False

    def __init__(self, options: Options) -> None:
        self._options = options
        self._had = {"training": 0.0, "requests": 0.0}
        self._last: str | None = None
        self._decided_s = 0.0

    def decide(self, view: View) -> Decision:
        """See the module."""
        self._account(view.now)
        steps = view.steps
        requests = bool(view.waiting) or any(seq.scoring is None for seq in view.running)
        total = sum(self._had.values())
        owed = self._had["training"] < self._options.share * total or not requests
        if steps and owed:
            self._last = "training"
            return train(view, {steps[0].step_id}, self._options.slice_s)
        self._last = "requests" if requests else None
        return serve(view, pause=True)

    def _account(self, now: float) -> None:
        """Credit the time since the last decision to what it chose, and forget a little."""
        passed = now - self._decided_s
        self._decided_s = now
        keep = max(0.0, 1.0 - passed / _MEMORY_S)
        for side in self._had:
            self._had[side] *= keep
        if self._last is not None:
            self._had[self._last] += min(passed, _MEMORY_S)
