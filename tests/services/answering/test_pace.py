"""The pace of a queue: nothing is predicted from little, and never more than serving takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.services.answering.pace import Pace


def served(pace: Pace, prompts: list[int], seconds: list[float], waiting: int = 10) -> None:
    for tokens, each_s in zip(prompts, seconds, strict=True):
        pace.passed(each_s, waiting)
        pace.started(tokens, waiting)


def test_nothing_is_predicted_from_a_few_starts():
    pace = Pace()
    assert pace.wait_s(1000, 1e6) == 0.0
    served(pace, [100] * 7, [0.1] * 7)
    assert pace.wait_s(1000, 1e6) == 0.0
    served(pace, [100], [0.1])
    assert pace.wait_s(1000, 1e5) == pytest.approx(100.0)


@pytest.mark.parametrize("start_s", [0.002, 0.1, 20.0])
def test_an_even_pace_is_found_however_slow(start_s):
    pace = Pace()
    served(pace, [100] * 300, [start_s] * 300)
    assert pace.wait_s(50, 5000) == pytest.approx(50 * start_s)


def test_starts_of_one_iteration_count_together():
    pace = Pace()
    for _ in range(40):
        served(pace, [100] * 10, [0.2] + [0.0] * 9)
    assert pace.wait_s(50, 5000) == pytest.approx(1.0, rel=0.05)


def test_a_queue_that_does_not_move_is_noticed():
    pace = Pace()
    served(pace, [100] * 100, [0.1] * 100)
    pace.passed(60.0, 10)
    assert pace.wait_s(10, 1000) > 10.0
    served(pace, [100] * 100, [0.1] * 100)
    assert pace.wait_s(10, 1000) < 3.0


def test_what_an_almost_empty_queue_was_served_at_counts_little():
    pace = Pace()
    served(pace, [100] * 100, [0.1] * 100, waiting=1)
    served(pace, [100] * 100, [0.004] * 100, waiting=100)
    assert pace.wait_s(100, 10_000) < 0.5


def test_an_empty_queue_has_no_pace():
    pace = Pace()
    served(pace, [100] * 20, [0.1] * 20)
    before = pace.wait_s(10, 1000)
    pace.passed(3600.0, 0)
    assert pace.wait_s(10, 1000) == before


@given(
    seen=st.lists(st.integers(1, 10_000), min_size=8, max_size=60),
    queue=st.lists(st.integers(1, 10_000), min_size=1, max_size=60),
    request_s=st.floats(0.0, 1.0),
    token_s=st.floats(1e-6, 1e-2),
)
def test_other_lengths_than_lately_are_never_taken_for_slower(seen, queue, request_s, token_s):
    pace = Pace()
    served(pace, seen, [request_s + token_s * tokens for tokens in seen])
    told_s = pace.wait_s(len(queue), sum(queue))
    assert told_s <= sum(request_s + token_s * tokens for tokens in queue) * (1 + 1e-9)
