"""When the policy is asked again: at once, after a pause, at its own time, or after a command.

Knows neither policies nor plans, only what came of the last question. Invariant: while requests are
there, the next question has a time; and nobody is asked more than twice at the same time in vain.
"""

from __future__ import annotations

import math

# A policy that runs nothing although requests are there, and does not say when it will, is asked
# again so much later: time may change its mind, and an engine that asks without a pause spins.
_RETRY_S = 0.01


class Asking:
    """`at_s` is when to ask next (None: now)."""

    def __init__(self) -> None:
        self.at_s: float | None = None
        self._stalled_since_s: float | None = None
        self._again = False

    def stalled_s(self, now: float) -> float:
        """For how long the policy has run nothing although requests are there, without saying when
        it will (`Decision.wake_at`): a fault of the policy."""
        return 0.0 if self._stalled_since_s is None else now - self._stalled_since_s

    def wake(self) -> None:
        """A command may have changed the answer."""
        self.at_s = None

    def ran(self) -> None:
        """There is a plan."""
        self.at_s, self._stalled_since_s, self._again = None, None, False

    def ran_nothing(
        self, now: float, wake_at: float | None, *, changed: bool, requests: bool
    ) -> None:
        """There is none, although `requests` are there, or only learning is.

        If sequences have `changed` their status (one gave way, and nobody got its blocks yet), the
        policy sees something else: it is asked at once, but not twice in a row. A `wake_at` that
        has passed says nothing, nor does one that never comes while requests are there.
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
