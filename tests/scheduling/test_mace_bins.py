"""MACE's packing by hand-made tasks, its order of priorities, and its ablations."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs

from tandem.scheduling.policies.mace import Mace, Options, Task
from tandem.scheduling.view import Budgets


class FakeView:
    """What packing reads of a view."""

    def __init__(self, blocks: int, running: int = 0, recording_room: int = 0) -> None:
        self.kv = SimpleNamespace(available_blocks=blocks)
        self.running = range(running)
        self.recording_room = recording_room
        self.budgets = Budgets(max_sequences=100, max_batch_tokens=100)


def task(name: int, blocks: int, seconds: float = 0.01, **more: object) -> Task:
    return structs.replace(Task(0.0, float(name), name, [], blocks, seconds), **more)


def packed(sizes: list[tuple[int, float]], capacity: int, **options: float) -> list[int]:
    tasks = [task(name, blocks, seconds) for name, (blocks, seconds) in enumerate(sizes)]
    policy = Mace(replace(Options(), **options))
    return [each.order for each in policy._first_bin(FakeView(capacity), tasks)]


def test_tasks_fill_the_first_bin_until_the_next_does_not_fit():
    assert packed([(4, 0.01), (4, 0.01), (4, 0.01)], 10) == [0, 1]


def test_a_smaller_task_goes_into_the_bin_that_it_fits_best():
    """After [6] and [7] a task of 3 leaves nothing of the second, one of the first."""
    assert packed([(6, 0.01), (7, 0.01), (3, 0.01), (4, 0.01)], 10, tau_memory=1.0) == [0, 3]


def test_latency_decides_between_bins_that_are_equally_free():
    sizes = [(6, 0.01), (6, 0.20), (2, 0.19)]
    assert packed(sizes, 10) == [0]
    assert packed(sizes, 10, lambda_latency=0.0) == [0, 2]


def test_a_full_first_bin_ends_the_packing():
    assert packed([(9, 0.01), (0, 0.01), (0, 0.01)], 10, tau_memory=0.9) == [0]


def test_only_so_many_tasks_are_looked_at():
    assert packed([(1, 0.01)] * 9, 100, tau_tasks=4) == [0, 1, 2, 3]


def test_a_task_larger_than_everything_opens_a_bin_of_its_own():
    assert packed([(50, 0.01), (1, 0.01)], 10) == [0]


def test_what_would_not_start_takes_no_room_from_what_runs():
    """Of 10 blocks, 4 are for the running; a task of 7 waits, and so does what came after it."""
    tasks = [
        task(0, 6),
        task(1, 7),
        task(2, 1),
        task(3, 1, begun=True),
        task(4, 0, begun=True),
    ]
    policy = Mace(Options(tau_memory=1.0))
    assert [each.order for each in policy._first_bin(FakeView(10, running=4), tasks)] == [0, 3, 4]
    assert [each.order for each in policy._fixed(FakeView(10, running=4), tasks)] == [0, 3, 4]
    assert [each.order for each in policy._fixed(FakeView(10), tasks)] == [0, 1, 2, 3, 4]


def test_fixed_batches_are_of_one_kind_or_of_both_in_order_of_arrival():
    """Two of each kind: steps 0, 3, 4; requests 1, 2, 5. The oldest is a step."""
    steps = (0, 3, 4)
    tasks = [task(each, 1, step=object() if each in steps else None) for each in range(6)]
    for apart, expected in ((True, [0, 3]), (False, [0, 1, 2, 3])):
        policy = Mace(Options(bins=False, apart=apart, fixed_inference=2, fixed_training=2))
        assert [each.order for each in policy._fixed(FakeView(10), tasks)] == expected


def test_a_step_without_recording_room_keeps_nobody_waiting():
    tasks = [task(0, 1, recorded=20), task(1, 1, recorded=10), task(2, 1)]
    found = Mace(Options())._first_bin(FakeView(10, recording_room=10), tasks)
    assert [each.order for each in found] == [1, 2]


@pytest.mark.parametrize(
    "options",
    [{"pi_ft": 2.5}, {"delta_decode": 0.2}, {"budget_s": 0.0}, {"tau_memory": 0.0}],
)
def test_constants_against_the_papers_order_are_refused(options):
    with pytest.raises(ValueError, match=r"must be|demands"):
        replace(Options(), **options)
