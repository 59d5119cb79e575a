"""When the policy decides next: now, after a retry delay, at a time it named, or after a command.

Knows neither policies nor plans, only how the last decision ended. Invariants: while requests
exist, the next decision has a finite time. At most two decisions in a row that run nothing are made
at the same time.
"""

from __future__ import annotations

import math

# A policy may run nothing although requests exist, and name no wake-up time. The next decision then
# comes after this delay: time may change the outcome, and an engine without a delay would spin.
_RETRY_S = 0.01


class NextDecision:
    """`at_s` is the time of the next decision, in seconds on the engine's clock (None: now)."""

    def __init__(self) -> None:
        self.at_s: float | None = None
        self._stalled_since_s: float | None = None
        self._again = False

    def stalled_s(self, now: float) -> float:
        """How long the policy has run nothing although requests exist, without naming a wake-up
        time (`Decision.wake_at`). That is a fault of the policy."""
        return 0.0 if self._stalled_since_s is None else now - self._stalled_since_s

    def wake(self) -> None:
        """Decide again now: a command may have changed the outcome."""
        self.at_s = None

    def ran(self) -> None:
        """The last decision led to a plan."""
        self.at_s, self._stalled_since_s, self._again = None, None, False

    def ran_nothing(
        self, now: float, wake_at: float | None, *, changed: bool, requests: bool
    ) -> None:
        """The last decision led to no plan. `requests`: whether requests exist, or only learning.

        `changed`: whether a sequence changed its status, for example because it was preempted and
        its blocks are still free. The policy then sees a new state and decides again at once, but
        not twice in a row. A `wake_at` in the past is ignored. An infinite one is ignored while
        requests exist.
        """
        if wake_at is not None and (wake_at <= now or (requests and math.isinf(wake_at))):
            wake_at = None
        self._again = changed and not self._again
        if wake_at is not None or not requests:
            self._stalled_since_s = None
        elif self._stalled_since_s is None:
            self._stalled_since_s = now
        if self._again:
            self.at_s = None
        elif wake_at is not None:
            self.at_s = wake_at
        else:
            self.at_s = now + _RETRY_S if requests or changed else math.inf
