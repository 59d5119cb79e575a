"""Which engine gets a request: the longest by prediction go to the second one, if it can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import InvalidRequest
from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.slo import WorkClass
from tandem.engine.division import Division, divide
from tandem.engine.placement import MAIN, Above, Overflow, overflow, quantile_of

BOTH = (MAIN, 1)


def request(tokens: float | None, work_class: WorkClass = WorkClass.ONLINE) -> Request:
    """One that is predicted to take so many tokens (None: nobody knows)."""
    length = None if tokens is None else Forecast((tokens,) * 5, 10_000, "test")
    return Request("r", (1,) * 500, length=length, work_class=work_class)


def accustomed(quantile: float = 0.9) -> Overflow:
    """It has seen predictions of 1 to 100 tokens."""
    overflow = Overflow(quantile)
    for tokens in range(1, 101):
        overflow.place(request(tokens), BOTH)
    return overflow


def test_what_is_predicted_to_be_longer_than_most_goes_to_the_second_engine():
    assert accustomed().place(request(91), BOTH) == 1
    assert accustomed().place(request(90), BOTH) == MAIN
    assert accustomed(0.5).place(request(51), BOTH) == 1


def test_an_engine_that_cannot_take_it_is_left_out():
    assert accustomed().place(request(1000), (MAIN,)) == MAIN


def test_what_nobody_knows_stays_with_the_main_engine():
    """A prompt of 500 tokens says nothing of the answer."""
    assert accustomed().place(request(None), BOTH) == MAIN


def test_a_few_predictions_are_no_threshold():
    overflow = Overflow()
    assert {overflow.place(request(tokens), BOTH) for tokens in range(1, 33)} == {MAIN}
    assert overflow.place(request(33), BOTH) == 1


def test_answers_of_one_length_all_stay():
    overflow = Overflow()
    assert {overflow.place(request(64), BOTH) for _ in range(100)} == {MAIN}


def test_a_batch_does_not_move_the_threshold_of_chats():
    overflow = accustomed()
    for _ in range(2000):
        overflow.place(request(5000, WorkClass.OFFLINE), BOTH)
    assert overflow.place(request(95), BOTH) == 1


def test_the_threshold_follows_the_traffic():
    overflow = accustomed()
    for tokens in range(1, 2001):
        overflow.place(request(1000 + tokens % 10), BOTH)
    assert overflow.place(request(900), BOTH) == MAIN
    assert overflow.place(request(1009.5), BOTH) == 1


def test_a_fixed_threshold_stays_where_it_is_under_an_attack():
    """Half of the traffic is long: all of it moves, where a recent quantile moves hardly any."""
    above, recent = Above(90), accustomed()
    attack = [request(10 if place % 2 else 400) for place in range(3000)]
    assert [above.place(each, BOTH) for each in attack] == [1, MAIN] * 1500
    moved = [recent.place(each, BOTH) for each in attack]
    assert sum(moved[1500:]) == 0
    assert above.place(request(None), BOTH) == above.place(request(400), (MAIN,)) == MAIN
    assert above.place(request(90), BOTH) == MAIN, "tau itself is not above"


def test_the_threshold_is_fixed_if_tokens_are_given():
    assert isinstance(overflow(0.9, 64), Above) and overflow(0.9, 64).place(request(65), BOTH) == 1
    assert isinstance(overflow(0.9, 0), Overflow)


def test_a_quantile_is_the_least_value_that_the_share_does_not_exceed():
    assert quantile_of(range(1, 101), 0.9) == 90
    assert quantile_of([7.0], 0.01) == quantile_of([7.0], 0.99) == 7.0


@given(st.lists(st.floats(1.0, 1e4), min_size=1, max_size=200))
def test_no_more_than_the_share_above_the_quantile_is_above_the_threshold(lengths):
    """Of values in any order, once they are all known."""
    overflow = Overflow(0.9)
    for tokens in lengths:
        overflow.place(request(tokens), BOTH)
    recent = overflow._recent[WorkClass.ONLINE]
    above = sum(tokens > recent.quantile(0.9) for tokens in lengths)
    assert above <= 0.1 * len(lengths)


@pytest.mark.parametrize(
    ("wanted", "cores", "gpu", "found"),
    [
        ("", 4, False, None),
        ("cores:1", 2, False, ((0,), (1,))),
        ("cores:2", 6, False, ((0, 1, 2, 3), (4, 5))),
        ("cores:2", 6, True, ((0, 1, 2, 3), (4, 5))),
        ("cpu", 16, True, ((), tuple(range(2, 16)))),
        ("cpu", 2, True, ((), (1,))),
        ("cpu", 1, True, ((), (0,))),
    ],
)
def test_cores_are_divided(wanted, cores, gpu, found):
    division = divide(wanted, range(cores), gpu=gpu)
    assert division == (None if found is None else Division(*found, gpu))


@pytest.mark.parametrize(
    ("wanted", "cores", "gpu", "threads", "problem"),
    [
        ("cores:2", 2, False, 0, "the main engine needs a core, too.*1 to 1"),
        ("cores:0", 2, False, 0, "needs a core"),
        ("cores:1", 1, False, 0, "none, for there is only one"),
        ("cores:1", 4, False, 4, "leaves 3 cores to the main engine, and --threads 4"),
        ("cpu", 8, False, 0, r"needs a main engine on a GPU.*--overflow cores:N"),
        ("gpu", 8, True, 0, "write cores:N, or cpu"),
        ("cores:x", 8, True, 0, "write cores:N, or cpu"),
    ],
)
def test_a_wrong_division_is_refused_with_what_to_write(wanted, cores, gpu, threads, problem):
    with pytest.raises(InvalidRequest, match=problem) as refused:
        divide(wanted, range(cores), gpu=gpu, threads=threads)
    assert refused.value.param == "scheduling.overflow"
