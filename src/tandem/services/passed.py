"""How much time has passed, for what is deleted after a while, where a clock may be set wrong.

Knows neither what is deleted nor when. Invariant: a clock that is ahead, at the start or later,
makes nothing old, unless something was stored by it before this start.
"""

from __future__ import annotations

from collections.abc import Callable

from tandem.store import Store, times


class Passed:
    """The time as far as the store and this server's running bear witness to it.

    `now` is the time since the epoch, and `monotonic` counts seconds whatever the clock is set to.
    """

    def __init__(
        self, store: Store, now: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self._store = store
        self._now = now
        self._monotonic = monotonic
        self._found_s: float | None = None
        self._began_s = 0.0

    def ran_s(self) -> float:
        """Seconds since some moment before this server's start, whatever the clock is set to."""
        return self._monotonic()

    async def time_s(self) -> float:
        """Now, but no later than the newest time that the store had at the first call, and the
        seconds since: what lies between, nobody but the clock says.

        To be called before anything new is kept.
        """
        if self._found_s is None:
            newest_s = await self._store.read(times.newest)
            self._began_s = self._monotonic()
            self._found_s = self._now() if newest_s is None else newest_s
        return min(self._now(), self._found_s + self._monotonic() - self._began_s)
