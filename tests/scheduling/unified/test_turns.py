"""Turns: nobody late, no change; else those in time first, and late ones never starve, neither
while they wait nor while they run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.request import Request
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.scheduling.policies.unified.turns import Turns
from tandem.scheduling.starts import StartTimes
from tandem.scheduling.state import SchedulerState
from tandem.scheduling.view import Budgets


@dataclass
class Stage:
    """What turns read of a view, and sequences that come and start."""

    now: float
    state: SchedulerState
    made: int = 0
    budgets: Budgets = field(default_factory=lambda: Budgets(64, 64))
    block_size: int = 16
    available_blocks: int = 100
    default_slo: Slo = field(default_factory=lambda: Slo(1.0, 0.1))

    @property
    def running(self) -> list[Sequence]:
        return self.state.running.requests

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

    def start(self, queue: list[Sequence], count: int) -> None:
        for seq in queue[:count]:
            self.state.run(seq)


def stage(now: float) -> Stage:
    return Stage(now, SchedulerState(Slo(1.0, 0.1)))


def test_the_order_is_that_of_class_and_arrival_while_nobody_is_late():
    view, turns = stage(10.0), Turns(0.25)
    offline = view.arrive(0.0, work_class=WorkClass.OFFLINE)
    later, tight = view.arrive(9.6), view.arrive(9.8, slo=Slo(0.5, 0.1))
    first = view.arrive(9.5)
    assert turns.queue(view, 9) == [first, later, tight, offline]
    assert turns.queue(view, 2) == [first, later]


def test_those_in_time_go_first_and_every_fourth_is_late():
    view, turns = stage(10.0), Turns(0.25)
    offline = view.arrive(0.0, work_class=WorkClass.OFFLINE)
    late = [view.arrive(place / 10) for place in range(5)]
    in_time = [view.arrive(9.5 + place / 100) for place in range(5)]
    begun = view.arrive(9.0, output=3)
    assert turns.queue(view, 99) == [
        begun, *in_time[:3], late[0], *in_time[3:], *late[1:], offline,
    ]  # fmt: skip
    assert turns.queue(view, 3) == [begun, *in_time[:2]]


def test_an_objective_of_its_own_decides_who_is_in_time():
    view, turns = stage(10.0), Turns(0.25)
    patient = view.arrive(5.0, slo=Slo(20.0, 0.1))
    late, usual = view.arrive(6.0), view.arrive(9.9)
    hurried = view.arrive(9.9, slo=Slo(0.05, 0.1))
    assert turns.queue(view, 9) == [usual, patient, late, hurried]


@pytest.mark.parametrize("at_once", [1, 2, 3, 7])
def test_the_share_of_the_late_holds_however_many_start_at_once(at_once):
    view, turns = stage(10.0), Turns(0.25)
    late = [view.arrive(place / 100) for place in range(100)]
    started = 0
    while started < 200:
        while len(view.starts.in_time(view.now, 20)) < 20:
            view.arrive(view.now)
        view.start(turns.queue(view, 30), at_once)
        started += at_once
        gone = sum(seq.seq_id not in view.state.waiting for seq in late)
        assert gone == started // 4
        assert all(seq.seq_id not in view.state.waiting for seq in late[:gone])


@given(
    late=st.integers(0, 12),
    in_time=st.integers(0, 12),
    begun=st.integers(0, 3),
    count=st.integers(1, 30),
    share=st.floats(0.01, 1.0),
)
def test_everybody_is_listed_once(late, in_time, begun, count, share):
    view, turns = stage(10.0), Turns(share)
    for _ in range(late):
        view.arrive(1.0)
    for _ in range(in_time):
        view.arrive(9.9)
    for _ in range(begun):
        view.arrive(0.0, output=1)
    view.arrive(0.0, work_class=WorkClass.OFFLINE)
    queue = turns.queue(view, count)
    assert len(queue) == len(set(map(id, queue))) == min(count, view.made)
    assert all(seq in view.waiting_in_order for seq in queue)


def test_a_share_of_one_is_first_come_first_served():
    view, turns = stage(10.0), Turns(1.0)
    late, in_time = view.arrive(1.0), view.arrive(9.9)
    assert turns.queue(view, 9) == [late, in_time]


def answer(view: Stage, began_s: float, first_s: float, **of_request: object) -> Sequence:
    """One that came at 5.0 and has two tokens."""
    seq = view.arrive(5.0, **of_request)
    view.start([seq], 1)
    seq.tokens += [1, 1]
    seq.computed, seq.first_scheduled_s, seq.first_token_s = 2, began_s, first_s
    return seq


def test_late_answers_have_one_of_so_many_passes_with_prompts():
    view, turns = stage(10.0), Turns(0.125)
    late = [answer(view, 6.5, 6.6) for _ in range(8)]
    others = [answer(view, 5.5, 5.6) for _ in range(8)]
    queue = [view.arrive(9.9)]
    ran: Counter[int] = Counter()
    for _ in range(80):
        resting = turns.resting(view, view.running, queue, 0.9)
        assert len(resting) == 7
        ran.update(seq.seq_id for seq in view.running if seq.seq_id not in resting)
    assert [ran[seq.seq_id] for seq in (*late, *others)] == [10] * 8 + [80] * 8
    assert not turns.resting(view, view.running, [], 0.9), "no prompt starts"
    assert not Turns(1.0).resting(view, view.running, queue, 0.9)


@pytest.mark.parametrize(
    ("began_s", "first_s", "of_request"),
    [
        (5.5, 6.5, {"slo": Slo(2.0, 0.1)}),  # by its own objective it is in time
        (5.0, 6.5, {}),  # its prompt takes so long by itself
        (9.0, 9.5, {"work_class": WorkClass.OFFLINE}),
    ],
)
def test_only_who_is_late_because_it_waited_rests(began_s, first_s, of_request):
    view, turns = stage(10.0), Turns(0.125)
    answer(view, began_s, first_s, **of_request)
    answer(view, 5.5, 5.6)
    queue = [view.arrive(9.9)]
    assert not any(turns.resting(view, view.running, queue, 0.9) for _ in range(20))


def test_nobody_rests_where_that_helps_nobody():
    view, turns = stage(10.0), Turns(0.01)
    for first_s in (6.5, 5.6):
        answer(view, first_s - 0.1, first_s)
    queue = [view.arrive(9.9)]
    assert turns.resting(view, view.running, queue, 0.9)
    assert not turns.resting(view, view.running, queue, 0.3), "there is no rush"
    view.available_blocks = 2
    assert not turns.resting(view, view.running, queue, 0.9), "the prompt cannot start"
    view.available_blocks, view.budgets = 100, Budgets(3, 64)
    assert not turns.resting(view, view.running, queue, 0.9), "slots are short"
    view.budgets = Budgets(64, 64)
    answer(view, 6.5, 6.6)
    assert not turns.resting(view, view.running, queue, 0.9), "most are late"
