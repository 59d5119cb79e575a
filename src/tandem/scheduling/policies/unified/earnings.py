"""A share of the time that work has whatever else wants it: earned while it waits, then used.

Knows seconds only. Invariant: never more is saved up than was said to be of use, nor owed than is
earned in `_AHEAD_S`.
"""

from __future__ import annotations

# Between two decisions at most so much counts: what came after a longer pause did not wait for it.
_LONGEST_S = 1.0
# What was had before it was earned counts for so long: who got its share in a lull does not get it
# once more in the rush that follows.
_AHEAD_S = 30.0


class Earnings:
    """What one kind of work has earned and not used yet: `seconds`, below 0 for what it has had
    ahead."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._ahead_s = 0.0  # at most
        self._counted_s: float | None = None

    def earn(self, now: float, share: float, most_s: float) -> None:
        """Credit a share of the time since the last call; `most_s` at most is kept."""
        if self._counted_s is not None:
            self.seconds += share * min(now - self._counted_s, _LONGEST_S)
        self._counted_s, self._ahead_s = now, share * _AHEAD_S
        self.seconds = max(-self._ahead_s, min(self.seconds, most_s))

    def spend(self, seconds: float) -> float:
        """Count `seconds` that were had, earned or ahead; how many of them count."""
        spent = min(self.seconds + self._ahead_s, max(0.0, seconds))
        self.seconds -= spent
        return spent

    def give_back(self, seconds: float) -> None:
        """What was spent came to nothing."""
        self.seconds += seconds

    def forget(self) -> None:
        """There is nothing that waits."""
        self.seconds, self._ahead_s, self._counted_s = 0.0, 0.0, None


class Balance:
    """Whose turn it is of two that want the same time: the one that has had less of its share.

    What was had more than `memory_s` ago counts for less and less, and nothing is counted while
    only one wants it: waiting saves nothing up.
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
        """So much of what the second one was given came to nothing."""
        self._had_s[1] = max(0.0, self._had_s[1] - second_s)

    def count(self, now: float, first_s: float, second_s: float) -> None:
        """Both wanted the time, and have been given so much of it."""
        keep = max(0.0, 1.0 - (now - self._counted_s) / self._memory_s)
        self._counted_s = now
        self._had_s = [keep * self._had_s[0] + first_s, keep * self._had_s[1] + second_s]
