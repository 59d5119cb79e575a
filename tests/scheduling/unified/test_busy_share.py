"""The share of the time in which online requests wait: pauses by parts as at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.request import Request
from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.scheduling.policies.unified.online import Load


@dataclass
class Result:
    elapsed_s: float


@dataclass
class Plan:
    """What is read of a plan."""

    step: int = field(default_factory=itertools.count().__next__)


@dataclass
class Stage:
    """What is read of a view."""

    now: float
    waiting_in_order: list[Sequence] = field(default_factory=list)
    last_results: tuple[Result, ...] = ()
    last_plan: Plan | None = None
    trailing_s: float = 0.0


def some(work_class: WorkClass = WorkClass.ONLINE) -> list[Sequence]:
    return [Sequence(1, Request("a", (1,) * 9, work_class=work_class), 0, None, [1] * 9)]


def after(now: float, took_s: float, waiting: list[Sequence]) -> Stage:
    """A decision after an iteration of `took_s`."""
    return Stage(now, waiting, (Result(0.0), Result(took_s)), Plan())


def test_while_somebody_waits_all_of_the_time_is_busy_and_then_none():
    load = Load()
    load.note(Stage(0.0, some()))
    assert load.busy == 0.0
    load.note(after(60.0, 60.0, some()))
    assert load.busy == pytest.approx(1.0)
    load.note(after(63.0, 3.0, []))
    assert load.busy == pytest.approx(1.0), "nobody waits any more, but the pass was for one"
    load.note(after(66.0, 3.0, some()))
    assert load.busy == pytest.approx(0.368, abs=1e-3), "three seconds ago it was 1"


def test_a_device_that_still_computes_slices_does_not_idle():
    load = Load()
    load.note(Stage(0.0, some()))
    load.note(replace(after(25.0, 5.0, some()), trailing_s=20.0))
    assert load.busy == pytest.approx(1.0, abs=1e-3)


def test_half_the_time_is_about_half():
    load = Load()
    for second in range(100):
        load.note(after(float(second), 0.5, some()))
    assert load.busy == pytest.approx(0.46, abs=0.01)


def test_the_iteration_after_which_there_was_nothing_to_do_counts_and_no_more():
    shares = []
    for took_s in (5.0, 10.0, 50.0):
        load = Load()
        load.note(Stage(0.0, some()))
        load.note(after(10.0, took_s, some()))
        shares.append(load.busy)
    assert 0.0 < shares[0] < shares[1] == shares[2]


def test_without_a_plan_it_is_the_time_for_which_one_waits():
    stale = (Result(5.0),)
    for waiting, wanted in ((some(), 0.964), ([], 0.0)):  # for want of blocks, or it was given up
        load = Load()
        load.note(Stage(0.0, some(), stale))
        load.note(Stage(10.0, waiting, stale))
        assert load.busy == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("others", [[], some(WorkClass.OFFLINE)])
def test_while_only_answers_learning_and_offline_requests_run_there_is_no_load(others):
    load = Load()
    for second in range(9):
        load.note(after(float(second), 1.0, others))
    assert load.busy == 0.0
    load.note(after(9.0, 1.0, some()))  # it has just come
    assert load.busy == 0.0


@given(st.lists(st.floats(1e-4, 5.0), min_size=1, max_size=30))
def test_a_stretch_without_anybody_who_waits_is_the_same_in_parts(parts_s):
    whole, apart, now = Load(), Load(), 7.0
    for load in (whole, apart):
        load.note(Stage(0.0, some()))
        load.note(after(now, 7.0, []))
    for part_s in parts_s:
        now += part_s
        apart.note(after(now, part_s, []))
    whole.note(after(now, parts_s[-1], []))
    assert 0.0 < apart.busy == pytest.approx(whole.busy, rel=1e-9)
