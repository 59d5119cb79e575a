"""Shedding: bounds hold, tickets leave once, the advice follows the pace."""

from __future__ import annotations

import pytest

from tandem.core.clock import VirtualClock
from tandem.core.errors import Overloaded
from tandem.services.admission import Admission


def test_requests_are_bounded_until_they_start() -> None:
    admission = Admission(2, 1000, VirtualClock())
    first, second = admission.admit(1), admission.admit(1)
    with pytest.raises(Overloaded, match="2 requests are waiting"):
        admission.admit(1)
    first.started()
    third = admission.admit(1)
    second.close()
    third.close()
    assert admission.waiting_requests == admission.waiting_tokens == 0


def test_tokens_are_bounded_but_a_large_request_passes_an_empty_queue() -> None:
    admission = Admission(10, 100, VirtualClock())
    large = admission.admit(500)
    with pytest.raises(Overloaded, match="500 prompt tokens"):
        admission.admit(1)
    large.started()
    admission.admit(60)
    with pytest.raises(Overloaded):
        admission.admit(41)
    admission.admit(40)


def test_a_ticket_leaves_once() -> None:
    admission = Admission(10, 100, VirtualClock())
    ticket = admission.admit(10)
    admission.admit(10)
    ticket.started()
    ticket.started()
    ticket.close()
    ticket.close()
    assert (admission.waiting_requests, admission.waiting_tokens) == (1, 10)


def test_the_advice_grows_with_the_time_between_starts() -> None:
    clock = VirtualClock()
    admission = Admission(10, 1000, clock)
    tickets = [admission.admit(1) for _ in range(10)]
    with pytest.raises(Overloaded) as quick:
        admission.admit(1)
    assert quick.value.retry_after_s == 1.0
    for ticket in tickets[:9]:
        clock.advance(20.0)
        ticket.started()
        admission.admit(1)
    with pytest.raises(Overloaded) as slow:
        admission.admit(1)
    assert 20.0 < slow.value.retry_after_s <= 60.0
