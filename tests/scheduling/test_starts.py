"""Start times: sorted whatever comes and goes, and divided at any time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.sequence import Sequence, SequenceStatus
from tandem.core.slo import Slo, WorkClass
from tandem.scheduling.starts import BEGUN, StartTimes
from tandem.scheduling.state import SchedulerState


def sequence(number: int, output: int = 0, **of_request: object) -> Sequence:
    return Sequence(number, Request(str(number), (1,), **of_request), 0, None, [1] * (1 + output))


@given(
    times=st.lists(st.sampled_from([BEGUN, 0, 1, 2, 3, 4, 5]), max_size=20),
    removals=st.lists(st.integers(0, 25), max_size=20),
    now=st.integers(0, 6),
    count=st.integers(0, 8),
)
def test_whoever_must_start_first_comes_first(times, removals, now, count):
    starts = StartTimes()
    expected = [(float(at_s), number) for number, at_s in enumerate(times)]
    known = {number: sequence(number) for _, number in expected}
    for at_s, number in expected:
        starts.add(known[number], at_s)
    for number in removals:
        starts.discard(known.get(number, sequence(99)))
        expected = [entry for entry in expected if entry[1] != number]
    begun = [number for at_s, number in sorted(expected) if at_s == BEGUN]
    late = [number for at_s, number in sorted(expected) if BEGUN < at_s < now]
    in_time = [number for at_s, number in sorted(expected) if at_s >= now]
    assert len(starts) == len(expected) and starts.any_late(now) == bool(late)
    assert [seq.seq_id for seq in starts.begun()] == begun
    assert [seq.seq_id for seq in starts.late(now, count)] == late[:count]
    assert [seq.seq_id for seq in starts.in_time(now, count)] == in_time[:count]


def test_online_requests_must_start_by_their_own_objective_until_they_have_a_token():
    state = SchedulerState(Slo(1.0, 0.1))
    first = sequence(0, arrival_s=10.0)
    own = sequence(1, arrival_s=10.0, slo=Slo(0.4, 0.1))
    offline = sequence(2, work_class=WorkClass.OFFLINE)
    preempted = sequence(3, output=2, arrival_s=1.0)
    for seq in (first, own, offline, preempted):
        state.add(seq)
    assert state.starts.in_time(0.0, 9) == [own, first]
    assert state.starts.late(10.5, 9) == [own] and state.starts.begun() == [preempted]
    state.run(own)
    assert state.starts.in_time(0.0, 9) == [first]
    state.wait(own)
    assert own.status is SequenceStatus.WAITING
    assert state.starts.in_time(0.0, 9) == [own, first]
    own.tokens.append(1)
    state.grow(own)
    state.remove(first)
    state.remove(preempted)
    assert state.starts.begun() == [own] and len(state.starts) == 1


def test_a_quarter_of_the_objective_is_left_for_the_prompt():
    assert Slo(2.0, 0.1).start_by(10.0) == pytest.approx(11.5)


def test_late_sequences_are_ranked_by_slack_over_expected_length():
    """At 10 s, a long answer that is 5 s late is as urgent as a short one that is 0.5 s late."""
    starts, known = StartTimes(), {}
    for number, (start_by_s, tokens) in enumerate(
        [(5.0, 100), (9.4, 10), (9.6, 10), (0.0, 300), (11.0, 1), (9.0, None)]
    ):
        length = None if tokens is None else Forecast((float(tokens),) * 5, 400, "test")
        known[number] = sequence(number, length=length)
        starts.add(known[number], start_by_s)
    ranked = [seq.seq_id for seq in starts.late_by_length(10.0)]
    assert ranked == [1, 0, 2, 3, 5], "the unknown one counts as 300 tokens, 4 is in time"
    assert starts.late_by_length(0.0) == []


def test_without_forecasts_the_one_that_is_late_for_longest_is_first():
    starts = StartTimes()
    for number, start_by_s in enumerate([3.0, 1.0, 2.0]):
        starts.add(sequence(number), start_by_s)
    assert starts.late_by_length(5.0) == starts.late(5.0, 9)


def test_a_long_answer_goes_before_short_ones_that_came_much_later():
    """A short answer becomes late each second, and one starts."""
    starts = StartTimes()
    long = sequence(0, length=Forecast((400.0,) * 5, 400, "test"))
    starts.add(long, 0.0)
    for number in range(1, 1000):
        short = sequence(number, length=Forecast((10.0,) * 5, 400, "test"))
        starts.add(short, number - 0.5)
        first = starts.late_by_length(float(number))[0]
        if first is long:
            break
        starts.discard(first)
    assert 10 < number < 30
