"""A pass tells what it kept of the micro-batches that it recorded."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from tandem.core.plan import KeptLayers, Span
from tandem.core.training import Role
from tandem.model import kernels
from training_harness import Driver, gentle, make_executor, open_trainer, random_sequences, wide

pytestmark = pytest.mark.skipif(not kernels.status().available, reason="no kernels")
PLENTY = 1 << 24


@dataclass
class Listening(Driver):
    """Remembers what the passes told."""

    told: list[KeptLayers] = field(default_factory=list)

    def run(self, *spans, **parts):
        result = super().run(*spans, **parts)
        self.told += result.kept
        return result


class Beside(Listening):
    """With a request in every pass."""

    def neighbours(self):
        return [Span(1, 0, (5, 6, 7), ((250, 251),))]


def told(driver: Listening) -> tuple[int, list[KeptLayers]]:
    open_trainer(driver.executor)
    sequences = random_sequences(random.Random(1), 2, (Role.TARGET,))
    return driver.record("t", 0, sequences)[0], driver.told


def test_a_pass_of_whole_micro_batches_keeps_all_while_there_is_room():
    driver = Listening(make_executor(gentle("qwen3"), "auto", graph_bytes=PLENTY))
    number, found = told(driver)
    assert found == [KeptLayers(number, 1.0, 0.0)]
    each = driver.executor.memory_bytes()["graphs"] // 3
    number, found = told(Listening(make_executor(gentle("qwen3"), "auto", graph_bytes=2 * each)))
    assert found == [KeptLayers(number, pytest.approx(2 / 3), 0.0)]


def test_nothing_is_kept_without_room_or_kernels_that_leave_anything():
    for driver in (
        Listening(make_executor(gentle("qwen3"), "auto", graph_bytes=0)),
        Beside(make_executor(gentle("qwen3"), "off", graph_bytes=PLENTY)),
    ):
        number, found = told(driver)
        assert found == [KeptLayers(number, 0.0, 0.0)]


@pytest.mark.skipif(not kernels.amx_linear(), reason="no AMX")
def test_beside_others_the_inner_part_is_kept_and_every_pass_says_so():
    model = wide("llama", torch.bfloat16)
    driver = Beside(make_executor(model, "auto", graph_bytes=PLENTY), random.Random(3))
    number, found = told(driver)
    assert len(found) > 1 and set(found) == {KeptLayers(number, 0.0, 1.0)}


def test_a_pass_that_records_nothing_tells_nothing():
    executor = make_executor(gentle("qwen3"), "auto")
    assert Listening(executor).run(Span(1, 0, (5, 6, 7), ((250, 251),))).kept == ()
