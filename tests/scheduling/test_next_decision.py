"""When a policy that ran nothing is asked again."""

from __future__ import annotations

import math

import pytest

from tandem.scheduling.next_decision import NextDecision


def test_who_ran_something_is_asked_at_once():
    decision = NextDecision()
    decision.ran_nothing(1.0, None, changed=False, requests=True)
    decision.ran()
    assert decision.at_s is None and decision.stalled_s(9.0) == 0.0


@pytest.mark.parametrize(
    ("wake_at", "requests", "at_s"),
    [(7.0, True, 7.0), (7.0, False, 7.0), (None, False, math.inf), (None, True, 1.01)],
)
def test_who_ran_nothing_is_asked_when_it_wishes_or_a_little_later_while_requests_are_there(
    wake_at, requests, at_s
):
    decision = NextDecision()
    decision.ran_nothing(1.0, wake_at, changed=False, requests=requests)
    assert decision.at_s == pytest.approx(at_s)
    assert decision.stalled_s(3.0) == (2.0 if requests and wake_at is None else 0.0)
    decision.wake()
    assert decision.at_s is None


def test_what_gave_way_is_asked_about_at_once_but_not_twice_in_a_row():
    decision = NextDecision()
    decision.ran_nothing(1.0, None, changed=True, requests=False)
    assert decision.at_s is None
    decision.ran_nothing(1.0, None, changed=True, requests=False)
    assert decision.at_s is not None and 1.0 < decision.at_s < 2.0
    decision.ran()
    decision.ran_nothing(2.0, None, changed=True, requests=False)
    assert decision.at_s is None


def test_a_stall_counts_from_its_beginning_whoever_comes_meanwhile():
    decision = NextDecision()
    for now in (1.0, 1.01, 1.02):
        decision.ran_nothing(now, None, changed=False, requests=True)
        decision.wake()
    assert decision.stalled_s(2.0) == 1.0
    decision.ran_nothing(3.0, None, changed=False, requests=False)
    assert decision.stalled_s(4.0) == 0.0


@pytest.mark.parametrize("wake_at", [4.0, 5.0, math.inf])
def test_a_wish_that_says_nothing_is_none(wake_at):
    """It has passed, or never comes: whoever follows it spins, or waits for ever."""
    decision = NextDecision()
    decision.ran_nothing(5.0, wake_at, changed=False, requests=True)
    assert decision.at_s is not None and 5.0 < decision.at_s < 6.0
    assert decision.stalled_s(7.0) == 2.0
