"""What an iteration did, by kind of work."""

from __future__ import annotations

import pytest
from learning_bench import bench_of, dpo_step, request

from tandem.core.events import IterationRecord, Work
from tandem.core.plan import LanePlan, StepResult
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import WorkClass
from tandem.engine.history import History


def offline(name: str, tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    return Request(name, tuple(range(tokens)), sampling, work_class=WorkClass.OFFLINE)


def test_rows_are_counted_for_who_asked_for_them() -> None:
    bench = bench_of("unified")
    bench.open("t")
    bench.loop.add(request("on", (1, 2, 3), 5))
    bench.loop.add(offline("off", 7))
    bench.loop.teaching.add_step(dpo_step("s", "t", [9, 14]))
    bench.run()
    stats = bench.loop.stats(100)
    sums = [
        sum(values)
        for values in zip(
            *((r.decode, r.prefill, r.offline, r.forward) for r in stats.recent), strict=True
        )
    ]
    recorded = stats.training_tokens
    # a prompt's last row draws the first token, so that one decode less follows
    assert sums == [4, 3, 7 + 3, recorded] and recorded > 0
    assert sum(sums) == stats.iteration_tokens_sum
    assert [r.number for r in stats.recent] == list(range(1, stats.iterations + 1))
    assert sum(r.updates for r in stats.recent) == 1 and sum(r.layers for r in stats.recent) > 0
    assert bench.loop.stats(100, stats.iterations - 2).recent == stats.recent[-2:]
    assert bench.loop.stats(3).recent == stats.recent[-3:], "no more leave the engine"
    assert bench.loop.stats(1, stats.iterations - 2).recent == stats.recent[-1:]
    assert bench.loop.stats().recent == ()


def test_blocks_are_counted_for_who_holds_them() -> None:
    bench = bench_of("unified")
    bench.loop.add(request("on", tuple(range(20)), 30))
    bench.loop.add(offline("off", 40))
    for _ in range(3):
        bench.loop.step()
    stats = bench.loop.stats()
    held = stats.kv_blocks_held
    assert held["online"] > 0 and held["learning"] == 0
    assert sum(held.values()) == stats.kv_blocks_used


def test_the_time_of_a_pass_is_divided_by_rows() -> None:
    history = History()
    rows = {Work.DECODE: 1, Work.PREFILL: 2, Work.OFFLINE: 0, Work.FORWARD: 1}
    result = StepResult(0, "device", 0.9, forward_s=0.8)
    history.add(1, 5.0, 1.0, [(LanePlan(0, "device", ()), result)], rows)
    assert history.seconds[Work.PREFILL] == pytest.approx(0.4)
    assert history.seconds[Work.DECODE] == history.seconds[Work.FORWARD] == pytest.approx(0.2)
    assert history.seconds[Work.HOST] == pytest.approx(0.2)
    assert sum(history.seconds.values()) == pytest.approx(1.0)
    assert history.last(9) == (IterationRecord(1, 5.0, 1.0, 0.8, 0.0, 1, 2, 0, 1, 0, 0),)


def test_the_time_of_a_pass_that_stopped_is_learnings() -> None:
    history = History()
    rows = dict.fromkeys((Work.DECODE, Work.PREFILL, Work.OFFLINE, Work.FORWARD), 0)
    result = StepResult(0, "device", 0.41, forward_s=0.4, stopped=True)
    history.add(1, 5.0, 0.41, [(LanePlan(0, "device", ()), result)], rows)
    assert history.seconds[Work.FORWARD] == pytest.approx(0.4)
    assert sum(history.seconds.values()) == pytest.approx(0.41)
