"""Sheds load before it queues: too much waits, or would wait too long, means "come back later".

Counts what this process sent to the engine and has not seen a first token of; asks nobody.
Invariant: every ticket that was admitted is counted until it starts or is closed, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tandem.config import ServerConfig
from tandem.core.clock import Clock
from tandem.core.errors import Overloaded
from tandem.services.answering.pace import Pace

_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 1.0, 60.0


class Reason(StrEnum):
    """Why a request is refused: so many requests wait, so many prompt tokens, or for so long."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    WAIT = "wait"


@dataclass(slots=True, eq=False)
class Ticket:
    """One admitted prompt; leaves the queue at its first token, or when it ends without any."""

    tokens: int
    since_s: float
    _admission: AdmissionControl

    def started(self) -> None:
        """The first token came."""
        self._admission._leave(self, started=True)

    def close(self) -> None:
        """It ended, whether or not it started. Idempotent."""
        self._admission._leave(self, started=False)


def _nobody(reason: str) -> None:
    """Hears of a refusal when nobody wants to know."""


class AdmissionControl:
    """Bounds of the queue: requests, prompt tokens of those requests, and what it means to wait in
    it. `shed` hears the reason of each refusal."""

    def __init__(
        self, bounds: ServerConfig, clock: Clock, shed: Callable[[str], None] = _nobody
    ) -> None:
        self._bounds = bounds
        self._clock = clock
        self._shed = shed
        self._waiting: dict[Ticket, None] = {}  # in order of arrival
        self._tokens = 0
        self._pace = Pace()
        self._seen_s = clock.now()

    @property
    def waiting_requests(self) -> int:
        """Prompts without a first token."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Their tokens."""
        return self._tokens

    def admit(self, prompts: Sequence[int], ttft_s: float | None = None) -> list[Ticket]:
        """Take a request into the queue, all its prompts of so many tokens or none.

        With an objective `ttft_s` it is refused if it would have to wait for more than
        `max_wait_factor` times as long. An empty queue takes every request, or a large one could
        never be served. Raises `Overloaded` with a time after which a retry makes sense.
        """
        self.check()
        now_s, requests = self._look(), len(self._waiting)
        if requests and self._tokens + sum(prompts) > self._bounds.max_waiting_tokens:
            raise self._overloaded(Reason.TOKENS, f"{self._tokens} prompt tokens are waiting")
        if ttft_s is not None and self._bounds.max_wait_factor > 0.0:
            self._check_wait(now_s, ttft_s)
        tickets = [Ticket(tokens, now_s, self) for tokens in prompts]
        self._waiting |= dict.fromkeys(tickets)
        self._tokens += sum(prompts)
        return tickets

    def check(self) -> None:
        """Raises `Overloaded` where every request would be refused, however small: before anything
        is done for it."""
        requests = len(self._waiting)
        if requests >= self._bounds.max_waiting_requests:
            self._look()
            raise self._overloaded(Reason.REQUESTS, f"{requests} requests are waiting")

    def _check_wait(self, now_s: float, ttft_s: float) -> None:
        """Refuse what would wait too long, once the oldest has waited for longer than `ttft_s`.

        Before that, nobody is late, and the pace may be that of a server with little to do.
        """
        oldest = next(iter(self._waiting), None)
        if oldest is None or now_s - oldest.since_s <= ttft_s:
            return
        wait_s = self.wait_s
        limit_s = self._bounds.max_wait_factor * ttft_s
        if wait_s > limit_s:
            self._shed(Reason.WAIT)
            after_s = _bounded(wait_s - limit_s)
            raise Overloaded(
                f"the server is behind: the first token would come in about {wait_s:.1f} s, and "
                f"more than {limit_s:.1f} s is too late for an objective of {ttft_s:g} s; retry "
                f"after {after_s:.0f} s, or send a larger ttft_slo",
                retry_after_s=after_s,
            )

    @property
    def wait_s(self) -> float:
        """Seconds until all that wait have started, as predicted; 0 if unknown."""
        return self._pace.wait_s(len(self._waiting), self._tokens)

    def _look(self) -> float:
        """The time; the pace learns of what has passed since the last look."""
        now_s = self._clock.now()
        self._pace.passed(now_s - self._seen_s, len(self._waiting))
        self._seen_s = now_s
        return now_s

    def _leave(self, ticket: Ticket, *, started: bool) -> None:
        if ticket not in self._waiting:
            return
        self._look()
        if started:
            self._pace.started(ticket.tokens, len(self._waiting))
        del self._waiting[ticket]
        self._tokens -= ticket.tokens
        assert self._tokens >= 0

    def _overloaded(self, reason: Reason, what: str) -> Overloaded:
        """Half of the queue should be gone by then, at the pace at which requests start now."""
        self._shed(reason)
        after_s = _bounded(self.wait_s / 2)
        return Overloaded(
            f"the server is at its limit: {what}; retry after {after_s:.0f} s",
            retry_after_s=after_s,
        )


def _bounded(seconds: float) -> float:
    return min(max(seconds, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)
