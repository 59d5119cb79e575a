"""How a micro-batch is divided into recordings, and how large they may be beside requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rates import slice_rates
from tandem.core.request import Request
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.core.training import Role, TrainingSequence
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.work import BackwardWork
from tandem.scheduling.state import SchedulerState
from tandem.scheduling.training import MicroBatchWork, recording_rows

SLICES = slice_rates(
    slice=1e-3, layer=1e-3, layer_row=1e-5, again_row=1e-5, first=1e-3, first_row=1e-5
)
RATES = Rates((1e-3,) * 14, SLICES, 1e-3, 1.0, True, True)


@dataclass
class Slow:
    """No layer is fast enough."""

    def recording_rows_within(self, seconds: float) -> int:
        return 0


sequences = st.lists(
    st.builds(
        lambda length, role: TrainingSequence((1,) * length, 1, role),
        st.integers(2, 40),
        st.sampled_from([Role.DESIRABLE, Role.UNDESIRABLE, Role.MISMATCHED]),
    ),
    max_size=12,
).map(tuple)


@given(sequences, st.integers(1, 100))
def test_recordings_hold_every_gradient_once_in_order(sequences, most_rows):
    batch = MicroBatchWork.of(count(7), sequences, 3, most_rows)
    places = [place for each in batch.recordings for place in each.places]
    wanted = [p for p, each in enumerate(sequences) if each.role is not Role.MISMATCHED]
    assert places == wanted
    assert [each.number for each in batch.recordings] == list(range(7, 7 + len(batch.recordings)))
    for each in batch.recordings:
        assert each.lengths == tuple(len(sequences[place].tokens) - 1 for place in each.places)
        assert sum(each.lengths) == each.rows
        assert each.rows <= most_rows or len(each.places) == 1
    for one, other in pairwise(batch.recordings):
        assert one.rows + other.lengths[0] > most_rows, "these fit together"
    targets = batch.targets()
    assert sorted(targets) == wanted
    for place, target in targets.items():
        recording = batch.recordings[target.micro_batch - 7]
        assert recording.places[target.sequence] == place


def test_a_layer_of_a_recording_takes_a_tenth_of_the_objective():
    latency = LatencyModel(RATES)
    rows = recording_rows(latency, 0.2)
    assert latency.slice_s(BackwardWork.of((rows,), begun=True), 1) == pytest.approx(0.02, rel=0.01)
    assert latency.slice_s(BackwardWork.of((rows + 1,), begun=True), 1) > 0.02
    assert recording_rows(latency, 0.4) == pytest.approx(0.04 / 0.02 * rows, rel=0.2)
    assert recording_rows(Slow(), 0.2) == 128, "smaller ones would cost more than they spare"


@pytest.mark.parametrize("pairs_s", [1e-9, 1e-3, 1.0, 30.0])
def test_a_long_sequence_has_as_many_rows_as_its_attention_leaves_time_for(pairs_s: float):
    slices = slice_rates(slice=1e-3, layer=1e-3, layer_row=1e-5, layer_pairs=pairs_s)
    latency = LatencyModel(replace(RATES, slices=slices))
    for seconds in (3e-3, 2e-2, 0.5):
        rows = latency.recording_rows_within(seconds)
        took_s = [
            latency.slice_s(BackwardWork.of((each,), begun=True), 1) for each in (rows, rows + 1)
        ]
        assert took_s[0] <= seconds * (1.0 + 1e-6) and took_s[1] > seconds * (1.0 - 1e-6)
    assert latency.recording_rows_within(1e-3) == 0


def test_the_strictest_of_the_last_objectives_counts():
    state = SchedulerState(Slo(1.0, 0.1))

    def add(number: int, slo: Slo | None, work_class: WorkClass = WorkClass.ONLINE) -> None:
        asked = Request(str(number), (1, 2), slo=slo, work_class=work_class)
        state.add(Sequence(number, asked, 0, None, [1, 2]))

    assert state.ttft_slo_s == 1.0
    add(0, Slo(0.2, 0.1))
    add(1, None, WorkClass.OFFLINE)
    assert state.ttft_slo_s == 0.2
    add(2, None)
    assert state.ttft_slo_s == pytest.approx(0.22)
    for number in range(3, 40):
        add(number, None)
    assert state.ttft_slo_s == 1.0
