"""The one device against starvation: a share of the time that a class is owed.

Knows seconds only. Invariant: what is owed, or was used ahead, is at most what is earned in the
patience.
"""

from __future__ import annotations


class Deficit:
    """A class earns a share of the time while it waits, and spends what it runs.

    Once it has earned what `patience_s` seconds bring it is `starving`: it may run whatever that
    costs others. Work that had its share in a quiet period does not get it again in the overload
    that follows, for as long as the patience. So the wait for a turn is at most twice the patience.
    """

    def __init__(self, share: float, patience_s: float) -> None:
        self.patience_s = patience_s
        self.starving = False
        self._share = share
        self._waited_s = 0.0  # seconds that earn what is owed; negative: used ahead
        self._since_s: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds that were earned and not used."""
        return self._share * self._waited_s

    def earn(self, now: float) -> None:
        """The class waits at `now`, and has since the last call."""
        if self._since_s is not None:
            waited_s = self._waited_s + now - self._since_s
            self._waited_s = min(max(waited_s, -self.patience_s), self.patience_s)
        self._since_s = now
        self.starving = self._waited_s >= self.patience_s

    def spend(self, seconds: float) -> float:
        """The class runs for `seconds`. Returns how many of them count."""
        before_s = self.seconds
        self._waited_s = max(self._waited_s - seconds / self._share, -self.patience_s)
        self.starving = False
        return before_s - self.seconds

    def give_back(self, seconds: float) -> None:
        """What was spent did not run."""
        self._waited_s += seconds / self._share

    def forget(self) -> None:
        """The class has no work."""
        self._waited_s, self.starving, self._since_s = 0.0, False, None
