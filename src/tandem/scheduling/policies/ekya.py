"""Retraining at a fixed interval, while inference waits (Ekya, Bhardwaj et al., NSDI 2022).

Every `interval_s` seconds a window opens if steps are queued. The steps that are queued then run
alone until they are done. Between windows requests run and steps wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.decision import Decision
from tandem.scheduling.retraining import serve, train
from tandem.scheduling.view import Policy, Traits, View


@dataclass(frozen=True, slots=True)
class Options:
    """`interval_s` is the least time, in seconds, from the start of a window to the next start."""

    interval_s: float = 30.0

    def __post_init__(self) -> None:
        if self.interval_s <= 0.0:
            raise ValueError("interval_s must be above 0")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return PeriodicRetraining(options.interval_s)


class PeriodicRetraining:
    """Keeps the steps of the open window and the time at which the next may open."""

    traits = Traits()

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s: float | None = None
        self._window: set[str] = set()

    def decide(self, view: View) -> Decision:
        """Train the steps of the open window; serve between windows."""
        if self._next_s is None:
            self._next_s = view.now + self._interval_s
        queued = view.queued_steps
        self._window &= set(queued)
        if not self._window and view.now >= self._next_s:
            self._window = set(queued)
            self._next_s = view.now + self._interval_s
        if self._window:
            return train(view, self._window)
        return serve(view, wake_at=self._next_s if queued else None)
