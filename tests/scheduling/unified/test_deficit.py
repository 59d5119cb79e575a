"""A share of the time that a class gets in any case: earned while it waits, then used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.scheduling.policies.unified.deficit import Deficit


def test_a_share_of_the_time_is_earned_used_and_given_back():
    deficit = Deficit(0.1, 10.0)
    deficit.earn(100.0)
    assert deficit.seconds == 0.0, "nothing before it waited"
    deficit.earn(104.0)
    assert deficit.seconds == pytest.approx(0.4) and not deficit.starving
    deficit.earn(130.0)
    assert deficit.seconds == pytest.approx(1.0) and deficit.starving, "no more than the patience"
    assert deficit.spend(0.7) == pytest.approx(0.7)
    assert deficit.seconds == pytest.approx(0.3) and not deficit.starving
    deficit.give_back(0.7)
    deficit.earn(130.0)
    assert deficit.starving, "what was spent did not run"
    deficit.forget()
    deficit.earn(200.0)
    assert deficit.seconds == 0.0 and not deficit.starving


def test_what_was_had_ahead_is_not_had_again_for_the_patience():
    deficit = Deficit(0.1, 10.0)
    deficit.earn(0.0)
    assert deficit.spend(50.0) == pytest.approx(1.0), "only so much counts"
    deficit.earn(10.0)
    assert deficit.seconds == pytest.approx(0.0)
    deficit.earn(20.0)
    assert deficit.starving


@given(st.floats(0.001, 1.0), st.lists(st.floats(0.001, 5.0), min_size=50, max_size=50))
def test_a_class_that_runs_only_when_it_starves_gets_its_share_and_waits_twice_the_patience(
    share, pieces_s
):
    deficit, now, last_s, had_s = Deficit(share, 3.0), 0.0, 0.0, 0.0
    deficit.earn(0.0)
    for piece_s in pieces_s:
        while not deficit.starving:
            now += 0.1
            deficit.earn(now)
        assert now - last_s <= 2 * 3.0 + 0.2
        last_s = now
        had_s += min(piece_s, 2 * share * 3.0)
        deficit.spend(piece_s)
    assert had_s <= share * (now + 2 * 3.0) * 1.001
