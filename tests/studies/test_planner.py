"""The study of the planner: where the share of requests inside falls, and the search for it."""

from __future__ import annotations

import math

import pytest

from benchmarks.planner.__main__ import STEP, Point, attained, crossing, search
from tandem.bench.workload import PlannedRequest
from tandem.build import build_simulation
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.slo import Slo
from tandem.estimators.datasheet import load_profile


def test_the_crossing_lies_between_the_two_rates_around_it():
    points = [Point(4.0, 0.5), Point(1.0, 1.0), Point(2.0, 0.95)]
    found = crossing(points, 0.9)
    assert 2.0 < found < 4.0
    assert crossing(points, 0.95) == 2.0
    assert math.isnan(crossing(points, 0.4)) and math.isnan(crossing(points[1:], 0.9))


@pytest.mark.parametrize("start", [0.5, 1.0, 3.0])
def test_the_search_goes_up_and_down_until_it_has_both_sides(start: float):
    points = search(lambda rate: 1.0 if rate < 1.5 else 0.0, 0.9, start)
    found = crossing(points, 0.9)
    assert 1.5 / STEP <= found <= 1.5 * STEP


def test_the_search_ends_where_nothing_fits():
    points = search(lambda rate: 0.0, 0.9, 1.0)
    assert math.isnan(crossing(points, 0.9)) and points[-1].rate >= 0.05


def test_what_has_not_ended_in_time_takes_nothing_from_the_next_run():
    clock = VirtualClock()
    loop, _ = build_simulation(resolve({}), load_profile("a100-40g:llama-3-8b"), clock)
    load = [PlannedRequest(0, 0.0, (1, 2), 4), PlannedRequest(1, 0.5, (1, 3), 5000)]
    assert attained(loop, clock, load, Slo(1.0, 0.1)) == 0.5
    assert not loop.has_work
