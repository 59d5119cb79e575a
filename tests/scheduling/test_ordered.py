"""Both orders hold whatever comes and goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.request import Request
from tandem.core.sequence import Scoring, Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.ordered import OrderedSequences, class_then_arrival

KINDS = st.tuples(st.sampled_from(WorkClass), st.integers(0, 3))


def sequence(number: int, work_class: WorkClass, arrival_s: float) -> Sequence:
    request = Request(str(number), (1,), work_class=work_class, arrival_s=arrival_s)
    scoring = Scoring((1,)) if work_class is WorkClass.LEARNING else None
    return Sequence(number, request, 0, None, [1], scoring=scoring)


@given(st.lists(KINDS, max_size=20), st.lists(st.integers(0, 30), max_size=30))
def test_both_orders_hold_whatever_comes_and_goes(kinds, removals):
    kept = OrderedSequences()
    expected = [sequence(number, *kind) for number, kind in enumerate(kinds)]
    for seq in expected:
        kept.add(seq)
    for removal in removals:
        if removal < len(expected):
            gone = expected.pop(removal)
            kept.remove(gone)
            assert gone.seq_id not in kept and kept.get(gone.seq_id) is None
    assert list(kept.values()) == expected and len(kept) == len(expected)
    assert kept.in_order == sorted(expected, key=class_then_arrival)
    assert kept.requests == [seq for seq in kept.in_order if seq.scoring is None]
    assert all(kept.get(seq.seq_id) is seq and seq.seq_id in kept for seq in expected)
