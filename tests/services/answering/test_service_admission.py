"""Shedding: bounds hold, tickets leave once, the advice follows the pace, waits are bounded."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import ServerConfig
from tandem.core.clock import VirtualClock
from tandem.core.errors import Overloaded
from tandem.services.answering.admission_control import AdmissionControl, Ticket


def bounded(requests: int, tokens: int, clock: VirtualClock | None = None) -> AdmissionControl:
    bounds = ServerConfig(max_waiting_requests=requests, max_waiting_tokens=tokens)
    return AdmissionControl(bounds, clock or VirtualClock())


def test_requests_are_bounded_until_they_start() -> None:
    admission = bounded(2, 1000)
    [first], [second] = admission.admit([1]), admission.admit([1])
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        admission.admit([1])
    first.started()
    [third] = admission.admit([1])
    second.close()
    third.close()
    assert admission.waiting_requests == admission.waiting_tokens == 0


def test_tokens_are_bounded_but_a_large_request_passes_an_empty_queue() -> None:
    admission = bounded(10, 100)
    [large] = admission.admit([500])
    with pytest.raises(Overloaded, match="500 prompt tokens"):
        admission.admit([1])
    large.started()
    admission.admit([60])
    with pytest.raises(Overloaded):
        admission.admit([41])
    admission.admit([40])


def test_a_ticket_leaves_once() -> None:
    admission = bounded(10, 100)
    [ticket] = admission.admit([10])
    admission.admit([10])
    ticket.started()
    ticket.started()
    ticket.close()
    ticket.close()
    assert (admission.waiting_requests, admission.waiting_tokens) == (1, 10)


def test_the_advice_grows_with_the_time_between_starts() -> None:
    clock = VirtualClock()
    admission = bounded(10, 1000, clock)
    tickets = admission.admit([1] * 10)
    with pytest.raises(Overloaded) as quick:
        admission.admit([1])
    assert quick.value.retry_after_s == 1.0
    for ticket in tickets[:9]:
        clock.advance(20.0)
        ticket.started()
        admission.admit([1])
    with pytest.raises(Overloaded) as slow:
        admission.admit([1])
    assert 20.0 < slow.value.retry_after_s <= 60.0


class Queue:
    """A server that starts one request after the other: `start_s` each, and `token_s` a token."""

    def __init__(self, factor: float, start_s: float = 0.1, token_s: float = 0.0) -> None:
        self.clock = VirtualClock()
        self.reasons: list[str] = []
        bounds = ServerConfig(max_wait_factor=factor)
        self.admission = AdmissionControl(bounds, self.clock, self.reasons.append)
        self.waits: list[float] = []
        self.refusals: list[Overloaded] = []
        self._start_s, self._token_s = start_s, token_s
        self._tickets: deque[tuple[Ticket, float]] = deque()
        self._due_s = 0.0

    def arrive(self, at_s: float, ttft_s: float | None = 1.0, tokens: int = 100) -> None:
        self.pass_until(at_s)
        try:
            [ticket] = self.admission.admit([tokens], ttft_s)
        except Overloaded as error:
            self.refusals.append(error)
            return
        if not self._tickets:
            self._due_s = at_s + self._seconds(tokens)
        self._tickets.append((ticket, at_s))

    def pass_until(self, now_s: float) -> None:
        while self._tickets and self._due_s <= now_s:
            ticket, at_s = self._tickets.popleft()
            self.clock.advance_to(self._due_s)
            ticket.started()
            self.waits.append(self._due_s - at_s)
            if self._tickets:
                self._due_s += self._seconds(self._tickets[0][0].tokens)
        self.clock.advance_to(now_s)

    def _seconds(self, tokens: int) -> float:
        return self._start_s + self._token_s * tokens


def test_nobody_waits_much_longer_than_the_factor_allows_and_the_server_stays_busy() -> None:
    def overloaded(factor: float) -> Queue:
        queue = Queue(factor)
        for place in range(900):  # 15 a second for a minute; it serves 10
            queue.arrive(place / 15)
        queue.pass_until(1000.0)
        return queue

    assert max(overloaded(0.0).waits) > 25.0
    for factor in (1.0, 5.0):
        queue = overloaded(factor)
        assert max(queue.waits) < factor + 1.0
        assert len(queue.waits) >= 10 * (59 + factor)
        assert queue.reasons == ["wait"] * (900 - len(queue.waits))


def test_bursts_at_an_ordinary_load_are_not_refused() -> None:
    """Five seconds' worth of requests at once, after a minute that showed no need to hurry."""
    queue = Queue(5.0, start_s=0.02)
    for place in range(300):
        queue.arrive(place / 5)
    for _ in range(200):
        queue.arrive(60.0)
    for place in range(100):
        queue.arrive(60.0 + place / 25)
    queue.pass_until(100.0)
    assert not queue.refusals and 4.0 < max(queue.waits) < 5.0


def test_a_request_is_accepted_after_the_time_that_its_refusal_names() -> None:
    queue = Queue(1.0)
    for place in range(200):
        queue.arrive(place / 20)
    late_s = queue.clock.now()
    for _ in range(40):  # others have longer objectives
        queue.arrive(late_s, ttft_s=100.0)
    before = len(queue.refusals)
    queue.arrive(late_s)
    (refusal,) = queue.refusals[before:]
    assert "objective of 1 s" in str(refusal) and "larger ttft_slo" in str(refusal)
    assert 2.0 < refusal.retry_after_s < 6.0
    queue.arrive(late_s + 0.5 * refusal.retry_after_s)
    queue.arrive(late_s + refusal.retry_after_s)
    assert len(queue.refusals) == before + 2


def test_a_request_without_an_objective_waits() -> None:
    queue = Queue(1.0)
    for place in range(300):
        queue.arrive(place / 30)
    refused = len(queue.refusals)
    assert refused
    queue.arrive(10.0, ttft_s=None)
    queue.arrive(10.0, ttft_s=60.0)
    assert len(queue.refusals) == refused


def test_an_empty_queue_takes_a_request_of_any_length() -> None:
    queue = Queue(1.0, token_s=0.001)
    for place in range(100):
        queue.arrive(place / 20)
    queue.pass_until(1000.0)
    queue.arrive(1000.0, ttft_s=0.001, tokens=100_000)
    queue.pass_until(2000.0)
    assert len(queue.waits) == 101 - len(queue.refusals) and queue.waits[-1] > 100.0


@given(gaps=st.lists(st.floats(0.0, 1.0), max_size=80), factor=st.floats(1.0, 5.0))
def test_nobody_is_refused_while_nobody_is_late(gaps: list[float], factor: float) -> None:
    queue, at_s = Queue(factor), 0.0
    for gap in gaps:
        at_s += gap
        before = len(queue.refusals)
        oldest_s = min((since for _, since in queue._tickets), default=at_s)
        queue.arrive(at_s)
        assert len(queue.refusals) == before or at_s - oldest_s > 1.0
