"""The share of the time that online requests take: by parts as at once, without learning alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.request import Request
from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.load import Load


@dataclass
class Result:
    elapsed_s: float


@dataclass
class Stage:
    """What is read of a view."""

    now: float
    serving: list[Sequence] = field(default_factory=list)
    waiting_in_order: list[Sequence] = field(default_factory=list)
    last_results: tuple[Result, ...] = ()


def some(work_class: WorkClass = WorkClass.ONLINE) -> list[Sequence]:
    return [Sequence(1, Request("a", (1,) * 9, work_class=work_class), 0, None, [1] * 9)]


def test_requests_without_a_pause_are_all_of_the_time_and_a_pause_none():
    load = Load()
    load.note(Stage(0.0, waiting_in_order=some()))
    assert load.busy == 0.0
    load.note(Stage(60.0, some()))
    assert load.busy == pytest.approx(1.0)
    load.note(Stage(63.0, (), (), (Result(3.0),)))  # the last one ended just now
    assert load.busy == pytest.approx(1.0)
    load.note(Stage(66.0, waiting_in_order=some()))
    assert load.busy == pytest.approx(0.368, abs=1e-3), "three seconds ago it was 1"


def test_half_the_time_is_half():
    load = Load()
    for second in range(100):
        load.note(Stage(float(second), (), some(), (Result(0.5),)))
    assert load.busy == pytest.approx(0.5)


def test_the_pass_in_which_the_last_one_ended_counts_and_no_more():
    load = Load()
    load.note(Stage(0.0, waiting_in_order=some()))
    load.note(Stage(10.0, waiting_in_order=some(), last_results=(Result(1.0), Result(5.0))))
    short = load.busy
    load = Load()
    load.note(Stage(0.0, waiting_in_order=some()))
    load.note(Stage(10.0, waiting_in_order=some(), last_results=(Result(50.0),)))
    assert load.busy == pytest.approx(2.0 * short) and short > 0.0


@pytest.mark.parametrize("others", [[], some(WorkClass.OFFLINE)])
def test_learning_and_offline_requests_alone_are_no_load(others):
    load = Load()
    for second in range(9):
        load.note(Stage(float(second), others, others, (Result(1.0),)))
    assert load.busy == 0.0
    load.note(Stage(9.0, others, some(), (Result(1.0),)))  # it has just come
    assert load.busy == 0.0


@given(st.lists(st.floats(1e-4, 5.0), min_size=1, max_size=30))
def test_a_stretch_is_the_same_in_parts(parts_s):
    whole, apart, now = Load(), Load(), 0.0
    for load in (whole, apart):
        load.note(Stage(now, waiting_in_order=some()))
    for part_s in parts_s:
        now += part_s
        apart.note(Stage(now, some()))
    whole.note(Stage(now, some()))
    assert apart.busy == pytest.approx(whole.busy, rel=1e-9)
