"""The account of an engine's memory adds up to what the system counts for its process."""

from __future__ import annotations

import gc
import multiprocessing
import sys

import pytest
import torch
from psutil import Process
from test_executor import GREEDY, make_executor, run

import tiny_models
from tandem.core.plan import Draw, Span
from tandem.executor import memory
from tandem.executor.kv_storage import lazy_zeros

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def test_the_purposes_add_up_to_the_process() -> None:
    """In a process of its own: another test's cache is not this executor's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        account, resident = pool.apply(_account_of_a_fresh_process)
    assert abs(sum(account.values()) - resident) < 0.02 * resident + (4 << 20)
    assert min(account.values()) >= 0 and account["other"] > 0 and account["libraries"] > 0


def _account_of_a_fresh_process() -> tuple[dict[str, int], int]:
    executor = make_executor(tiny_models.make_model("llama"), "auto")
    draw = Draw(1, 0, 0, GREEDY)
    run(executor, Span(1, 0, (3, 4, 5), ((1,),), draws=(draw,)))
    gc.collect()
    return executor.memory_bytes(), Process().memory_info().rss


def test_a_cache_counts_as_far_as_it_was_written() -> None:
    cpu = torch.device("cpu")
    before = memory.whole_account({"kv": 1 << 40, "recordings": 0}, cpu)["kv"]
    cache = lazy_zeros((64 << 20,), cpu, torch.float32)  # 256 MiB
    cache[: 8 << 20] = 1.0
    written = memory.whole_account({"kv": 1 << 40, "recordings": 0}, cpu)["kv"] - before
    assert 32 << 20 <= written <= 40 << 20
    assert memory.whole_account({"kv": 5, "recordings": 0}, cpu)["kv"] == 5


def test_elsewhere_the_account_is_what_is_known() -> None:
    account = {"weights": 7, "kv": 1 << 40, "recordings": 0}
    assert memory.whole_account(account, torch.device("cuda")) == account
