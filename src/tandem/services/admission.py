"""Sheds load before it queues: too many requests or tokens waiting means "come back later".

Counts what this process sent to the engine and has not seen a first token of; asks nobody.
Invariant: every ticket that was admitted is counted until it starts or is closed, once.
"""

from __future__ import annotations

from tandem.core.clock import Clock
from tandem.core.errors import Overloaded

_MAX_RETRY_AFTER_S = 60.0
_SMOOTHING = 0.1


class Ticket:
    """One admitted request; leaves the queue at its first token, or when it ends without any."""

    def __init__(self, admission: Admission, tokens: int) -> None:
        self._admission = admission
        self._tokens = tokens
        self._waiting = True

    def started(self) -> None:
        """The first token came."""
        if self._waiting:
            self._waiting = False
            self._admission._leave(self._tokens, started=True)

    def close(self) -> None:
        """The request ended, whether or not it started. Idempotent."""
        if self._waiting:
            self._waiting = False
            self._admission._leave(self._tokens, started=False)


class Admission:
    """Bounds of the queue: requests, and prompt tokens of those requests."""

    def __init__(self, max_requests: int, max_tokens: int, clock: Clock) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock = clock
        self._requests = 0
        self._tokens = 0
        self._start_interval_s = 0.0
        self._last_start_s: float | None = None

    @property
    def waiting_requests(self) -> int:
        """Requests without a first token."""
        return self._requests

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of these requests."""
        return self._tokens

    def admit(self, tokens: int) -> Ticket:
        """Take a request of `tokens` prompt tokens into the queue.

        A request that alone exceeds the token bound still passes an empty queue, or it could
        never be served. Raises `Overloaded` with a time after which a retry makes sense.
        """
        if self._requests >= self._max_requests:
            raise self._overloaded(f"{self._requests} requests are waiting")
        if self._requests and self._tokens + tokens > self._max_tokens:
            raise self._overloaded(f"{self._tokens} prompt tokens are waiting")
        self._requests += 1
        self._tokens += tokens
        return Ticket(self, tokens)

    def _leave(self, tokens: int, *, started: bool) -> None:
        self._requests -= 1
        self._tokens -= tokens
        assert self._requests >= 0 and self._tokens >= 0
        if started:
            now_s = self._clock.now()
            if self._last_start_s is not None and self._requests:
                interval_s = now_s - self._last_start_s
                self._start_interval_s += _SMOOTHING * (interval_s - self._start_interval_s)
            self._last_start_s = now_s

    def _overloaded(self, what: str) -> Overloaded:
        """Half of the queue should be gone by then, at the pace at which requests start now."""
        retry_after_s = self._start_interval_s * self._requests / 2
        retry_after_s = min(max(retry_after_s, 1.0), _MAX_RETRY_AFTER_S)
        return Overloaded(
            f"the server is at its limit: {what}; retry after {retry_after_s:.0f} s",
            retry_after_s=retry_after_s,
        )
