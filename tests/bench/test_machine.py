"""What figures are measured on is read from the machine, and what others take of it."""

from __future__ import annotations

import time

import pytest

from tandem.bench import machine


def test_the_machine_is_described():
    found = machine.describe("cpu", 3)
    assert found["device"] == "cpu" and found["threads"] == 3 and found["cores"] >= 1
    assert found["memory_gib"] > 0 and set(found["matrix_flags"]) <= set(machine.MATRIX_FLAGS)
    assert found["torch"][0].isdigit()


@pytest.mark.parametrize(("busy_s", "share"), [(1.0, 0.0), (6.0, 0.25), (99.0, 1.0)])
def test_others_take_what_this_process_does_not(busy_s, share):
    """Ten seconds on two cores, of which this process has one second."""
    told = iter([(5.0, 7.0, 2.0), (15.0, 7.0 + busy_s, 3.0)])
    watch = machine.Watch(lambda: next(told), cores=2)
    assert watch.others() == pytest.approx(share)


def test_time_that_was_not_idle_is_busy():
    before = machine.busy_cpu_s()
    until_s = time.process_time() + 0.3
    while time.process_time() < until_s:
        pass
    assert machine.busy_cpu_s() - before > 0.2
