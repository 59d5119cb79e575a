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


SIZES = st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 2_000)), min_size=8, max_size=60)


@given(seen=SIZES, queue=SIZES, request_s=st.floats(0.0, 1.0), token_s=st.floats(1e-6, 1e-2))
@pytest.mark.parametrize("known", [False, True])
def test_other_lengths_than_lately_are_never_taken_for_slower(
    known, seen, queue, request_s, token_s
):
    def seconds(prompt: int, answer: int) -> float:
        return request_s + token_s * (prompt + 3 * answer * known)

    pace = Pace()
    for prompt, answer in seen:
        pace.passed(seconds(prompt, answer), 10)
        pace.started(prompt, 10, answer * known)
    prompts, answers = (sum(column) for column in zip(*queue, strict=True))
    told_s = pace.wait_s(len(queue), prompts, answers * known)
    assert told_s <= sum(seconds(*each) for each in queue) * (1 + 1e-9)


def test_a_queue_of_short_answers_moves_faster():
    """A start takes as long as an answer before it, 10 ms a token."""
    pace = Pace()
    for _ in range(100):
        pace.passed(1.0, 10)
        pace.started(50, 10, 100.0)
    assert pace.wait_s(20, 1000, 200.0) == pytest.approx(2.0)
    assert pace.wait_s(20, 1000, 2000.0) == pytest.approx(20.0)
    assert pace.wait_s(20, 1000, 8000.0) == pytest.approx(20.0), "not slower than lately"
