"""Overdue: nobody's place changes before the oldest offline request has got nothing for long."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.request import Request
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.scheduling.policies.unified.overdue import Overdue
from tandem.scheduling.starts import StartTimes
from tandem.scheduling.state import SchedulerState
from tandem.scheduling.view import Budgets


@dataclass
class Stage:
    """What is read of a view, and sequences that come, start and end."""

    now: float = 0.0
    state: SchedulerState = field(default_factory=lambda: SchedulerState(Slo(1.0, 0.1)))
    budgets: Budgets = field(default_factory=lambda: Budgets(8, 16))
    made: int = 0

    @property
    def starts(self) -> StartTimes:
        return self.state.starts

    @property
    def waiting_in_order(self) -> list[Sequence]:
        return self.state.waiting.in_order

    @property
    def learning_starts(self) -> int:
        return self.state.learning_starts

    @property
    def running_in_order(self) -> list[Sequence]:
        return self.state.running.in_order

    def arrive(self, output: int = 0, **of_request: object) -> Sequence:
        request = Request(str(self.made), (1, 2, 3), arrival_s=self.now, **of_request)
        seq = Sequence(self.made, request, 0, None, [1] * (3 + output))
        self.made += 1
        self.state.add(seq)
        return seq

    def offline(self) -> Sequence:
        return self.arrive(work_class=WorkClass.OFFLINE)

    def queue(self, overdue: Overdue) -> list[Sequence]:
        return overdue.queue(self, list(self.waiting_in_order))

    def pass_by(self, overdue: Overdue, starts: int) -> None:
        """So many online requests come, start and end, one in each decision."""
        for _ in range(starts):
            seq = self.arrive()
            assert self.queue(overdue)[0] is seq
            self.state.run(seq)
            self.state.remove(seq)
        self.queue(overdue)


def served(stage: Stage, overdue: Overdue) -> list[tuple[int, int | None]]:
    requests = stage.state.running.requests
    return [(each.seq_id, each.max_tokens) for each in overdue.serve(stage, requests)]


def test_both_time_and_starts_must_have_passed():
    stage, overdue = Stage(), Overdue(0.25, 10.0)
    oldest = stage.offline()
    stage.pass_by(overdue, 3)
    stage.now = 30.0
    online = stage.arrive()
    assert stage.queue(overdue) == [online, oldest]  # three starts only
    stage.state.remove(online)
    another = stage.arrive()
    assert stage.queue(overdue) == [oldest, another]


def test_starts_alone_make_nobody_overdue():
    stage, overdue = Stage(), Overdue(0.25, 10.0)
    oldest = stage.offline()
    stage.pass_by(overdue, 9)
    stage.now = 9.9
    online = stage.arrive()
    assert stage.queue(overdue) == [online, oldest]
    stage.now = 10.0
    assert stage.queue(overdue) == [oldest, online]


def test_starts_of_learning_count_from_when_the_request_is_the_oldest():
    stage, overdue = Stage(), Overdue(0.25, 10.0)
    stage.state.learning_starts = 9
    oldest = stage.offline()
    stage.queue(overdue)
    online = stage.arrive()
    for starts, first in ((3, online), (1, oldest)):
        stage.now += 10.0
        stage.state.learning_starts += starts
        assert stage.queue(overdue)[0] is first


def test_who_gets_on_is_not_overdue_and_who_is_preempted_again_and_again_is():
    stage, overdue = Stage(), Overdue(1.0, 10.0)
    oldest, younger = stage.offline(), stage.offline()
    for _ in range(9):  # one token every 9 seconds
        stage.state.run(oldest)
        stage.pass_by(overdue, 1)
        oldest.tokens.append(1)
        stage.now += 9.0
        stage.state.wait(oldest)
        assert stage.queue(overdue) == [oldest, younger]
    for _ in range(2):
        stage.state.run(oldest)
        stage.pass_by(overdue, 1)
        stage.now += 9.0
        stage.state.wait(oldest)
    online = stage.arrive()
    assert stage.queue(overdue) == [oldest, online, younger]


def test_answers_that_have_begun_come_before_it():
    stage, overdue = Stage(), Overdue(1.0, 10.0)
    oldest = stage.offline()
    stage.pass_by(overdue, 1)
    stage.now = 10.0
    first, begun = stage.arrive(), stage.arrive(output=2)
    assert stage.queue(overdue) == [begun, oldest, first]


def test_it_runs_first_leaves_each_other_one_a_row_and_is_no_victim():
    stage, overdue = Stage(), Overdue(1.0, 10.0)
    oldest = stage.offline()
    stage.pass_by(overdue, 1)
    online = [stage.arrive() for _ in range(3)]
    for seq in (*online, oldest):
        stage.state.run(seq)
    running = stage.running_in_order
    assert served(stage, overdue) == [(seq.seq_id, None) for seq in (*online, oldest)]
    assert overdue.victims(running) == running and overdue.kept == []
    stage.now = 10.0
    stage.queue(overdue)
    everyone = [(oldest.seq_id, 13), *[(seq.seq_id, None) for seq in online]]
    assert served(stage, overdue) == everyone
    assert overdue.victims(running) == online and overdue.kept == [oldest]
    stage.budgets = Budgets(8, 2)  # fewer rows than requests
    assert served(stage, overdue)[0] == (oldest.seq_id, 1)


def test_the_next_may_be_overdue_once_it_has_ended():
    stage, overdue = Stage(), Overdue(1.0, 10.0)
    oldest, younger = stage.offline(), stage.offline()
    stage.pass_by(overdue, 1)
    stage.now = 10.0
    assert stage.queue(overdue) == [oldest, younger]
    stage.state.run(oldest)
    stage.pass_by(overdue, 1)
    stage.now = 99.0
    online = stage.arrive()
    assert stage.queue(overdue) == [online, younger]  # one at a time
    stage.state.remove(oldest)
    assert stage.queue(overdue) == [younger, online]


@given(
    online=st.integers(0, 9),
    offline=st.integers(0, 4),
    count=st.integers(0, 9),
    waited_s=st.sampled_from([0.0, 5.0, 50.0]),
    passed=st.integers(0, 4),
)
def test_everybody_is_listed_once_and_in_order_but_for_one(
    online, offline, count, waited_s, passed
):
    stage, overdue = Stage(), Overdue(0.5, 10.0)
    waiting = [stage.offline() for _ in range(offline)]
    stage.pass_by(overdue, passed)
    stage.now = waited_s
    for _ in range(online):
        stage.arrive()
    usual = stage.waiting_in_order[:count]
    found = overdue.queue(stage, list(usual))
    if offline and waited_s > 10.0 and passed >= 2:
        assert found == [waiting[0], *[seq for seq in usual if seq is not waiting[0]]]
    else:
        assert found == usual


def test_a_waiting_one_has_no_claim_while_others_of_its_class_go_on():
    stage, overdue = Stage(), Overdue(0.25, 10.0)
    stage.offline()
    running = stage.offline()
    stage.state.run(running)
    for _ in range(30):
        stage.now += 1.0
        running.tokens.append(1)
        stage.pass_by(overdue, 1)
    assert overdue.sequence is None
    stage.now += 20.0
    stage.pass_by(overdue, 4)
    assert overdue.sequence is running
