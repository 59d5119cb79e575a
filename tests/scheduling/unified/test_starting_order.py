"""The order of starts: nobody late, no change; else those in time first, and now and then a late
one."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.scheduling.policies.unified.online import starting_order
from tandem.scheduling.starts import StartTimes
from tandem.scheduling.state import SchedulerState


@dataclass
class Stage:
    """What is read of a view, and sequences that come."""

    now: float
    state: SchedulerState
    made: int = 0

    @property
    def starts(self) -> StartTimes:
        return self.state.starts

    @property
    def waiting_in_order(self) -> list[Sequence]:
        return self.state.waiting.in_order

    def arrive(self, at_s: float, output: int = 0, **of_request: object) -> Sequence:
        request = Request(str(self.made), (1,), arrival_s=at_s, **of_request)
        seq = Sequence(self.made, request, 0, None, [1] * (1 + output))
        self.made += 1
        self.state.add(seq)
        return seq


def stage(now: float) -> Stage:
    return Stage(now, SchedulerState(Slo(1.0, 0.1)))


def test_the_order_is_that_of_class_and_arrival_while_nobody_is_late():
    view = stage(10.0)
    offline = view.arrive(0.0, work_class=WorkClass.OFFLINE)
    later, tight = view.arrive(9.6), view.arrive(9.8, slo=Slo(0.5, 0.1))
    first = view.arrive(9.5)
    assert starting_order(view, 9, owed=False) == [first, later, tight, offline]
    assert starting_order(view, 2, owed=True) == [first, later]


def test_those_in_time_go_first_and_before_them_one_that_is_owed_its_start():
    view = stage(10.0)
    offline = view.arrive(0.0, work_class=WorkClass.OFFLINE)
    late = [view.arrive(place / 10) for place in range(5)]
    in_time = [view.arrive(9.5 + place / 100) for place in range(5)]
    begun = view.arrive(9.0, output=3)
    usual = [begun, *in_time, *late, offline]
    assert starting_order(view, 99, owed=False) == usual
    assert starting_order(view, 99, owed=True) == [begun, late[0], *in_time, *late[1:], offline]
    assert starting_order(view, 3, owed=True) == [begun, late[0], in_time[0]]


def test_an_objective_of_its_own_decides_who_is_in_time():
    view = stage(10.0)
    patient = view.arrive(5.0, slo=Slo(20.0, 0.1))
    late, usual = view.arrive(6.0), view.arrive(9.9)
    hurried = view.arrive(9.9, slo=Slo(0.05, 0.1))
    assert starting_order(view, 9, owed=False) == [usual, patient, late, hurried]


def test_late_ones_go_by_slack_over_expected_length_behind_those_in_time():
    view = stage(10.0)

    def arrive(at_s: float, tokens: float) -> Sequence:
        return view.arrive(at_s, length=Forecast((tokens,) * 5, 400, "test"))

    long, short, recent, in_time = (
        arrive(1.0, 300),
        arrive(6.0, 10),
        arrive(8.0, 10),
        arrive(9.9, 1),
    )
    assert starting_order(view, 9, owed=False) == [in_time, short, recent, long]
    assert starting_order(view, 9, owed=True) == [long, in_time, short, recent]


@given(
    late=st.one_of(st.integers(0, 12), st.integers(250, 300)),
    in_time=st.integers(0, 12),
    begun=st.integers(0, 3),
    count=st.one_of(st.integers(1, 30), st.integers(250, 350)),
    owed=st.booleans(),
)
def test_everybody_is_listed_once(late, in_time, begun, count, owed):
    view = stage(10.0)
    for place in range(late):
        tokens = 1.0 + 7 * place % 50
        view.arrive(1.0, length=Forecast((tokens,) * 5, 400, "test") if place % 3 else None)
    for _ in range(in_time):
        view.arrive(9.9)
    for _ in range(begun):
        view.arrive(0.0, output=1)
    view.arrive(0.0, work_class=WorkClass.OFFLINE)
    queue = starting_order(view, count, owed=owed)
    assert len(queue) == len(set(map(id, queue))) == min(count, view.made)
    assert all(seq in view.waiting_in_order for seq in queue)
