"""Saved-up time and turns: nothing is saved without end, and both sides get their share."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.scheduling.policies.unified.earnings import Balance, Earnings


def test_a_share_of_the_time_is_earned_used_and_given_back():
    earned = Earnings()
    earned.earn(10.0, 0.1, 5.0)
    assert earned.seconds == 0.0, "nobody waited before"
    earned.earn(10.5, 0.1, 5.0)
    assert earned.seconds == pytest.approx(0.05)
    earned.earn(100.0, 0.1, 5.0)
    assert earned.seconds == pytest.approx(0.15), "of a long pause one second counts"
    assert earned.spend(-1.0) == 0.0
    assert earned.spend(0.1) == pytest.approx(0.1)
    assert earned.spend(0.01) == pytest.approx(0.01)
    earned.give_back(0.01)
    earned.earn(101.0, 1.0, 0.5)
    assert earned.seconds == 0.5, "no more than is of use"
    earned.forget()
    earned.earn(200.0, 1.0, 0.5)
    assert earned.seconds == 0.0


def test_what_was_had_ahead_is_not_had_again_for_half_a_minute():
    earned = Earnings()
    earned.earn(0.0, 0.01, 1.0)
    assert earned.spend(9.0) == pytest.approx(0.3), "no more counts than is earned in 30 s"
    for now in range(1, 31):
        earned.earn(float(now), 0.01, 1.0)
        assert earned.seconds <= 1e-9
    earned.earn(31.0, 0.01, 1.0)
    assert earned.seconds == pytest.approx(0.01)
    earned.spend(0.2)
    earned.earn(31.0, 0.001, 1.0)
    assert earned.seconds == pytest.approx(-0.03), "nor of a share that has become less"
    earned.forget()
    assert earned.spend(5.0) == 0.0, "while nobody waits nothing is counted"


@settings(max_examples=50, deadline=None)
@given(share=st.sampled_from([0.1, 0.5, 0.8]), seed=st.integers(0, 1000))
def test_turns_keep_the_shares_however_long_the_pieces(share, seed):
    random, balance, now, had = Random(seed), Balance(share), 0.0, [0.0, 0.0]
    for _ in range(1000):
        piece_s = random.uniform(0.001, 0.2)
        given_s = (piece_s, 0.0) if balance.first else (0.0, piece_s)
        now += piece_s
        had = [had[0] + given_s[0], had[1] + given_s[1]]
        balance.count(now, *given_s)
    assert had[0] / sum(had) == pytest.approx(share, abs=0.03)


def test_what_was_had_long_ago_is_forgotten():
    balance = Balance(0.5)
    balance.count(0.0, 8.0, 0.0)
    assert not balance.first
    balance.count(100.0, 0.0, 0.1)
    assert balance.first
