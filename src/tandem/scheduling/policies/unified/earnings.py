"""A share of the time that one kind of work gets in any case: earned while it waits, then used.

Knows seconds only. Invariant: savings do not exceed what is of use, and time used ahead does not
exceed what is earned in `_AHEAD_S`.
"""

from __future__ import annotations

# Longest time between two decisions that counts, in seconds: after a longer pause the work did not
# wait for all of it.
_LONGEST_S = 1.0
# Time used ahead counts up to what is earned in this many seconds. Work that got its share in a
# quiet period does not get it again in the overload that follows.
_AHEAD_S = 30.0


class Earnings:
    """`seconds` is what one kind of work has earned and not used. It is negative for time that was
    used ahead."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ahead_s = 0.0  # at most
        self._counted_s: float | None = None

    def earn(self, now: float, share: float, most_s: float) -> None:
        """Credit a share of the time since the last call. At most `most_s` seconds are saved."""
        if self._counted_s is not None:
            self.seconds += share * min(now - self._counted_s, _LONGEST_S)
        self._counted_s, self._ahead_s = now, share * _AHEAD_S
        self.seconds = max(-self._ahead_s, min(self.seconds, most_s))

    def spend(self, seconds: float) -> float:
        """Count `seconds` that were used, earned or ahead; returns how many of them count."""
        spent = min(self.seconds + self._ahead_s, max(0.0, seconds))
        self.seconds -= spent
        return spent

    def give_back(self, seconds: float) -> None:
        """The work of a `spend` did not happen."""
        self.seconds += seconds

    def forget(self) -> None:
        """Reset: none of the work waits."""
        self.seconds, self._ahead_s, self._counted_s = 0.0, 0.0, None


class Balance:
    """Whose turn it is of two kinds of work that want the same time: the one below its share.

    Time that was used more than `memory_s` seconds ago counts less and less. Nothing is counted
    while only one kind wants the time, so waiting saves nothing up.
    """

    def __init__(self, share: float, memory_s: float = 10.0) -> None:
        """`share` of the time is the first one's."""
        self._share = share
        self._memory_s = memory_s
        self._had_s = [0.0, 0.0]
        self._counted_s = 0.0

    @property
    def first(self) -> bool:
        """Whether it is the first one's turn."""
        return self._had_s[0] * (1.0 - self._share) <= self._had_s[1] * self._share

    def give_back(self, second_s: float) -> None:
        """This much of what the second one was given did not happen."""
        self._had_s[1] = max(0.0, self._had_s[1] - second_s)

    def count(self, now: float, first_s: float, second_s: float) -> None:
        """Both wanted the time, and were given these seconds of it."""
        keep = max(0.0, 1.0 - (now - self._counted_s) / self._memory_s)
        self._counted_s = now
        self._had_s = [keep * self._had_s[0] + first_s, keep * self._had_s[1] + second_s]
