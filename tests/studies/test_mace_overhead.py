"""Table 1: the account of objects, and that the time is the scheduler's alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.mace.engines import make_engine
from benchmarks.mace.overhead import deep_bytes, measure_overhead
from benchmarks.mace.runs import SCALES, VARIANTS, Load
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.estimators.datasheet import load_profile

SMALL = replace(SCALES[0], rate=8.0, duration_s=3.0, pair_tokens=64)
LOAD = Load(SMALL, load_profile(SMALL.profile), 0.5)
MACE = next(variant for variant in VARIANTS if variant.name == "mace")


def test_time_is_what_deciding_admitting_and_applying_take():
    """A timer that is asked four times an iteration: two of its ticks are the scheduler's."""
    ticks = count()
    found = measure_overhead(MACE, LOAD, make_engine, lambda: 0.001 * next(ticks))
    assert found.iterations > 50
    assert abs(found.schedule_s - 0.002) < 1e-9


@pytest.mark.parametrize("runs", [1, 2])
def test_of_several_runs_the_least_time_counts(runs):
    """A timer that goes ever faster: the first run takes the least."""
    ticks = count()
    found = measure_overhead(MACE, LOAD, make_engine, lambda: float(next(ticks) ** 2), runs)
    asked = next(ticks)
    first = 4 * found.iterations
    assert first <= asked // runs < 2 * first
    assert found.schedule_s < 3.0 * first


def test_nothing_is_scheduled_if_nobody_comes():
    nobody = replace(LOAD, scale=replace(SMALL, rate=1e-9))
    found = measure_overhead(MACE, nobody, make_engine)
    assert (found.iterations, found.schedule_s) == (0, 0.0)


@pytest.mark.full
def test_memory_grows_with_what_is_queued():
    more = replace(LOAD, scale=replace(SMALL, rate=30.0))
    small = measure_overhead(MACE, LOAD, make_engine).state_bytes
    assert 100_000 < small < measure_overhead(MACE, more, make_engine).state_bytes < 20_000_000
    assert measure_overhead(MACE, LOAD, make_engine).state_bytes == small


class Node:
    __slots__ = ("own", "peer")

    def __init__(self, own: object) -> None:
        self.own, self.peer = own, self


@given(st.lists(st.lists(st.binary(min_size=2), max_size=5), max_size=5))
def test_each_object_counts_once_and_cycles_end(lists):
    once = [*lists, *lists]
    parts = {id(part): part for each in lists for part in [each, *each]}
    expected = sys.getsizeof(once) + sum(sys.getsizeof(part) for part in parts.values())
    assert deep_bytes(once) == expected
    node = Node(once)
    assert deep_bytes(node) == expected + sys.getsizeof(node)


def test_requests_and_code_are_not_the_schedulers():
    request = Request("r", tuple(range(1000, 9000)), SamplingParams())
    assert deep_bytes([request, Request, len, test_requests_and_code_are_not_the_schedulers]) == (
        sys.getsizeof([None] * 4)
    )
