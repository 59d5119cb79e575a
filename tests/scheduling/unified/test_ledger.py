"""What fits of learning into an iteration: never too much, and short cuts miss nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rates import slice_rates
from tandem.core.plan import RecordTarget
from tandem.core.request import Request
from tandem.core.sequence import Scoring, Sequence, SequenceStatus
from tandem.core.slo import WorkClass
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.terms import FORWARD_TERMS
from tandem.estimators.work import PassWork
from tandem.scheduling.policies.unified.ledger import Ledger
from tandem.scheduling.policies.unified.rest import LearningItem
from tandem.scheduling.view import Budgets

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


def item(number: int, lengths: list[int], computed: int, starving: bool) -> LearningItem:
    sequences = []
    for place, length in enumerate(lengths):
        seq_id = 10 * number + place
        request = Request(str(seq_id), (1,) * length, work_class=WorkClass.LEARNING)
        scoring = Scoring((1,) * length, record=RecordTarget(number, place))
        tokens = [1] * length
        sequences.append(Sequence(seq_id, request, 0, None, tokens, scoring=scoring))
    sequences[0].computed = min(computed, lengths[0] - 1)
    return LearningItem(0.0, 0.0, sequences, starving=starving)


def ledger(rows: int, seconds: float, blocks: int = 1000) -> Ledger:
    work = PassWork(decodes=4, context=400, longest=100, draws=4)
    latency = LatencyModel(RATES)
    work_s = latency.forward_s(work)
    return Ledger(
        latency, 16, False, rows, seconds, blocks, 1000, 1000, 1000.0, work, work_s
    )  # fmt: skip


ITEMS = st.lists(
    st.tuples(st.lists(st.integers(1, 150), min_size=1, max_size=3), st.sampled_from([0, 0, 9])),
    max_size=8,
)


@settings(max_examples=200)
@given(ITEMS, st.integers(1, 600), st.floats(0.02, 0.6), st.booleans())
def test_what_is_granted_fits(shapes, rows, seconds, needed):
    left, found = ledger(rows, seconds), []
    for number, (lengths, computed) in enumerate(shapes):
        one = item(number, lengths, computed, starving=False)
        found += left.forwards(one, needed=needed and not found)
    assert sum(candidate.max_tokens or 0 for candidate in found) == rows - left.rows <= rows
    if not needed:
        assert not found or left.left_s >= 0.0


def test_what_has_no_time_takes_no_place_from_others():
    left = ledger(500, 0.001)
    for number in range(8):
        assert not left.forwards(item(number, [100], 0, starving=False), needed=False)
    assert left.slots == 1000 and left.blocks == 1000 and left.rows == 500


def test_at_least_a_piece_is_given_when_it_is_needed():
    long = item(0, [100], 0, starving=False)
    assert not ledger(500, 0.0).forwards(long, needed=False)
    given_all_the_same = ledger(500, 0.0).forwards(long, needed=True)
    assert [candidate.max_tokens for candidate in given_all_the_same] == [16]


def test_a_piece_of_an_offline_prompt_has_a_block_at_least_where_no_more_fits():
    """On a slow processor the slack of a decode is a few rows of a prompt."""
    request = Request("0", (1,) * 200, work_class=WorkClass.OFFLINE)

    def granted(seconds_of_rows: int, *, needed: bool = False) -> list[int | None]:
        left = ledger(500, 0.0)
        work = left.work.copy()
        work.span(0, seconds_of_rows)
        left.seconds = left.latency.forward_s(work)
        seq = Sequence(0, request, 0, None, [1] * 200)
        return [each.max_tokens for each in left.prompt(seq, 0, 13, needed=needed)]

    assert granted(15) == [] and granted(16) == [16] and granted(40) == [40]
    assert granted(0, needed=True) == [16]


def test_only_what_is_starving_starts_without_blocks():
    assert not ledger(500, 1.0, blocks=1).forwards(item(0, [50], 0, starving=False), needed=False)
    started = ledger(500, 1.0, blocks=1).forwards(item(0, [50], 0, starving=True), needed=False)
    assert [candidate.may_preempt for candidate in started] == [True]


def test_a_starving_sequence_that_began_goes_before_one_that_has_no_room_beside_it():
    """The first of the step gave way once; were it asked for first, it would hold up the other."""
    starving = item(1, [100, 100], 0, starving=True)
    first, second = starving.sequences
    starving.step, second.computed, second.status = None, 60, SequenceStatus.RUNNING
    for most, wanted in ((6.0, [second.seq_id]), (7.0, [second.seq_id, first.seq_id])):
        left = ledger(1000, 10.0)
        left.reclaimable = most
        assert [each.seq_id for each in left.forwards(starving, needed=True)] == wanted


class Opens:
    """A step, as far as it is read, whose sequences are recorded by so many rows."""

    def __init__(self, rows: int) -> None:
        self.opened, self.rows, self.recordings = False, rows, [self]
        self.number = id(self)

    def micro_batch_of(self, record: RecordTarget) -> Opens:
        return self


def test_a_small_recording_does_not_open_before_a_large_one_that_waits_for_room():
    """In order of priority the large one comes first. It would starve."""
    left = ledger(500, 1.0)
    for number, (rows, fits) in enumerate(((600, True), (600, False), (10, False))):
        each = item(number, [20], 0, starving=False)
        each.step = Opens(rows)  # type: ignore[assignment]
        assert bool(left.forwards(each, needed=False)) == fits


def offline(number: int, length: int, status: SequenceStatus) -> Sequence:
    request = Request(str(number), (1,) * length, work_class=WorkClass.OFFLINE)
    return Sequence(number, request, 0, None, [1] * length, status=status)


def test_no_other_prompt_begins_while_one_does_not_end():
    """Prompts that share its prefix would compute it again."""
    running, waiting = SequenceStatus.RUNNING, SequenceStatus.WAITING
    target = ledger(rows=300, seconds=10.0)
    assert target.prompt(offline(1, 200, running), 100, 0, needed=False)[0].max_tokens == 100
    assert target.prompt(offline(2, 100, waiting), 0, 7, needed=False)[0].max_tokens == 100
    assert target.prompt(offline(3, 150, waiting), 0, 10, needed=False)[0].max_tokens == 100
    assert target.prompt(offline(4, 100, waiting), 0, 7, needed=False) == []
    target.rows = 300
    assert target.prompt(offline(4, 100, waiting), 0, 7, needed=False) == []
    assert target.prompt(offline(5, 100, running), 0, 0, needed=False)[0].max_tokens == 100


def test_of_a_pass_of_learning_alone_only_the_first_sequence_is_cut():
    """A micro-batch that is computed in parts keeps no graph."""
    for whole, lengths, rows in (
        (False, [100, 100], [100, 30]),
        (True, [100, 100], [100]),
        (True, [100, 30], [100, 30]),
        (True, [200, 30], [130]),
    ):
        left = ledger(130, 10.0)
        left.whole = whole
        alone = item(0, lengths, 0, starving=False)
        alone.step = Opens(sum(lengths))  # type: ignore[assignment]
        assert [each.max_tokens for each in left.forwards(alone, needed=True)] == rows


def test_a_pass_may_take_up_to_twice_as_long_for_one_whole_sequence_unless_a_request_runs():
    latency, alone = LatencyModel(RATES), item(0, [150], 0, starving=False)
    work = PassWork()
    work.span(0, 150, scored=150, recorded=150)
    first_s = latency.forward_s(work)
    view = SimpleNamespace(latency=latency, budgets=Budgets(8, 200), serving=[])
    for share, kept in ((0.4, 0.4), (0.6, 1.0), (1.5, 1.5)):
        assert alone.whole_s(view, share * first_s) == pytest.approx(kept * first_s)
    request = Request("online", (1, 2))
    view.serving = [Sequence(9, request, 0, None, [1, 2])]
    assert alone.whole_s(view, 0.6 * first_s) == pytest.approx(0.6 * first_s)


@pytest.mark.parametrize(
    ("recording_s", "row_s", "rows"),
    [(4.5e-3, 1.7e-3, 16), (9e-3, 1.4e-3, 29), (9e-3, 3.6e-5, 64)],
)
def test_a_piece_of_a_training_forward_takes_at_least_its_fixed_cost(recording_s, row_s, rows):
    """Within a block and 64 rows: on a slow processor a longer one fits beside no answers."""
    terms = dict(zip(FORWARD_TERMS, RATES.forward, strict=True))
    terms |= {"row": row_s, "scored": 2e-5, "recording": recording_s, "recorded": 1e-9}
    latency = LatencyModel(replace(RATES, forward=tuple(terms.values())))
    alone = item(0, [150], 0, starving=False)
    assert alone.least_rows(latency, 16) == 16  # a score
    alone.step = Opens(150)  # type: ignore[assignment]
    assert alone.least_rows(latency, 16) == rows
    assert alone.least_rows(latency, 128) == 64
    left = ledger(200, 0.0)
    left.latency, needed = latency, left.work.copy()
    needed.span(0, rows, scored=rows, recorded=rows)
    left.seconds = latency.forward_s(needed) - 1e-6
    assert not left.forwards(alone, needed=False)
    left.seconds += 2e-6
    assert [each.max_tokens for each in left.forwards(alone, needed=False)] == [rows]
