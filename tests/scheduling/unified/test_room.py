"""What fits of learning into an iteration: never too much, and short cuts miss nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rates import slice_rates
from tandem.core.plan import RecordTarget
from tandem.core.request import Request
from tandem.core.sequence import Scoring, Sequence, SequenceStatus
from tandem.core.slo import WorkClass
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.work import PassWork
from tandem.scheduling.policies.unified.room import LearningItem, Room

RATES = Rates(
    (0.02, 1e-3, 1e-4, 1e-5, 1e-5, 1e-3, 1e-2, 1e-4, 1e-4, 0.01, 1e-4, 1e-3, 1e-5, 1e-3),
    slice_rates(
        slice=1e-3,
        layer=1e-3,
        layer_row=1e-5,
        again=1e-6,
        again_row=1e-6,
        rest_row=1e-6,
        first=1e-3,
        first_row=1e-6,
    ),
    0.01,
    0.2,
)


def item(number: int, lengths: list[int], computed: int, overdue: bool) -> LearningItem:
    sequences = []
    for place, length in enumerate(lengths):
        seq_id = 10 * number + place
        request = Request(str(seq_id), (1,) * length, work_class=WorkClass.LEARNING)
        scoring = Scoring((1,) * length, record=RecordTarget(number, place))
        tokens = [1] * length
        sequences.append(Sequence(seq_id, request, 0, None, tokens, scoring=scoring))
    sequences[0].computed = min(computed, lengths[0] - 1)
    return LearningItem(0.0, 0.0, sequences, overdue=overdue)


def room(tokens: int, pass_s: float, full_s: float, blocks: int = 1000) -> Room:
    work = PassWork(decodes=4, context=400, longest=100, draws=4)
    latency = LatencyModel(RATES)
    work_s = latency.forward_s(work)
    return Room(latency, 16, False, tokens, pass_s, work, work_s, 1000, blocks, 1000, full_s)


ITEMS = st.lists(
    st.tuples(st.lists(st.integers(1, 150), min_size=1, max_size=3), st.sampled_from([0, 0, 9])),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(ITEMS, st.integers(1, 600), st.floats(0.02, 0.6), st.sampled_from([0.0, 0.3]), st.booleans())
def test_what_did_not_fit_is_not_asked_for_again_and_would_not_fit(
    shapes, tokens, pass_s, full_s, needed
):
    """With what is remembered of rows that do not fit, and without, the same is granted."""
    granted = []
    for forgets in (False, True):
        left = room(tokens, pass_s, full_s)
        found = []
        for number, (lengths, computed) in enumerate(shapes):
            if forgets:
                left.too_many = float("inf")
            found += left.forwards(item(number, lengths, computed, False), needed and not found)
        granted.append(found)
        assert sum(candidate.max_tokens or 0 for candidate in found) <= tokens
        if not needed:
            assert not found or left.left_s() >= 0.0
    assert granted[0] == granted[1]


def test_what_has_no_time_takes_no_place_from_others():
    """The first that does not fit is found out; the next ones are not even offered a slot."""
    space = room(500, 0.001, 0.0)
    for number in range(8):
        assert not space.forwards(item(number, [100], 0, False), False)
    assert space.slots == 999


def test_at_least_a_piece_is_given_when_it_is_needed():
    long = item(0, [100], 0, False)
    assert not room(500, 0.0, 0.0).forwards(long, needed=False)
    given_all_the_same = room(500, 0.0, 0.0).forwards(long, needed=True)
    assert [candidate.max_tokens for candidate in given_all_the_same] == [64]


def test_a_part_waits_until_the_pass_may_be_a_long_one():
    some = room(500, 0.13, 0.0).forwards(item(0, [150], 0, False), False)
    assert 64 <= sum(candidate.max_tokens or 0 for candidate in some) < 150
    assert not room(500, 0.13, 0.3).forwards(item(0, [150], 0, False), False)


def test_only_what_is_overdue_starts_without_blocks():
    assert not room(500, 1.0, 0.0, blocks=1).forwards(item(0, [50], 0, False), False)
    started = room(500, 1.0, 0.0, blocks=1).forwards(item(0, [50], 0, True), False)
    assert [candidate.may_preempt for candidate in started] == [True]


def test_an_overdue_sequence_that_began_goes_before_one_that_has_no_room_beside_it():
    """The first of the step gave way once; were it asked for first, it would hold up the other."""
    overdue = item(1, [100, 100], 0, overdue=True)
    first, second = overdue.sequences
    overdue.step, second.computed, second.status = None, 60, SequenceStatus.RUNNING
    for most, wanted in ((6.0, [second.seq_id]), (7.0, [second.seq_id, first.seq_id])):
        space = room(1000, 10.0, 0.0)
        space.most_blocks = most
        assert [each.seq_id for each in space.forwards(overdue, needed=True)] == wanted
