"""Echo: online first, offline requests by what they find in the cache, and room for bursts."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from test_policies import Recording, run

from fake_executor import FakeExecutor
from tandem.core.errors import InvalidRequest
from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo, WorkClass
from tandem.kv.cache import KVCache
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets

SIZE = 4
DOCUMENT = tuple(range(100, 112))


def scheduler(blocks: int = 100, tokens: int = 64, slo: Slo | None = None, **options: str):
    policy = Recording(build_policy("echo", options))
    policy.traits = policy.inner.traits
    info = replace(FakeExecutor(blocks, SIZE, max_model_len=200).info, eos_token_ids=())
    cache = KVCache(blocks, SIZE, eviction=policy.traits.eviction)
    slo = slo or Slo(1.0, 1.0)
    return Scheduler(policy, cache, Budgets(8, tokens), info, default_slo=slo), policy


def add(target: Scheduler, name: str, prompt, answer: int = 8, offline: bool = True) -> None:
    kind = WorkClass.OFFLINE if offline else WorkClass.ONLINE
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    target.add(Request(name, tuple(prompt), params, work_class=kind), None)


def step(target: Scheduler, now: float = 0.0) -> list[tuple[str, int, int]]:
    """Run an iteration; the request, start and number of tokens of each span."""
    plan = target.schedule(now)
    known = {seq_id: seq.request.request_id for seq_id, seq in target.state.all.items()}
    run(target, plan)
    assert plan is not None
    spans = [span for lane in plan.lanes for span in lane.spans]
    target.cache.check()
    return [(known[span.seq_id], span.start, len(span.tokens)) for span in spans]


def test_the_request_that_finds_its_document_starts_before_older_ones():
    target, _ = scheduler()
    add(target, "first", (*DOCUMENT, 1), answer=1)
    assert step(target) == [("first", 0, 13)]
    add(target, "older", range(13))
    add(target, "shares", (*DOCUMENT, 2))
    assert step(target) == [("shares", 12, 1)], "one prompt is added in an iteration"
    assert step(target) == [("shares", 13, 1), ("older", 0, 13)]


def test_first_come_first_served_without_the_scheduler():
    target, _ = scheduler(scheduler="false", cache="false")
    add(target, "first", (*DOCUMENT, 1), answer=1)
    step(target)
    add(target, "older", range(13))
    add(target, "shares", (*DOCUMENT, 2))
    assert step(target) == [("older", 0, 13), ("shares", 12, 1)]


@pytest.mark.parametrize("options", [{}, {"cache": "false"}, {"scheduler": "false"}])
def test_an_iteration_ends_before_the_first_online_token_is_due(options):
    target, policy = scheduler(tokens=512, slo=Slo(1.0, 0.02), **options)
    add(target, "online", range(8), offline=False)
    step(target)
    for number in range(3):
        add(target, f"offline {number}", [number] * 150)
    spans = step(target)
    lane = policy.last.lanes["device"]
    assert lane.seconds is not None and lane.seconds <= 0.02
    assert spans[0][0] == "online" and sum(rows for *_, rows in spans) < 150


def test_without_the_estimator_no_time_is_kept():
    off = {"estimator": "false", "scheduler": "false", "cache": "false"}
    target, policy = scheduler(blocks=200, tokens=512, slo=Slo(1.0, 0.02), **off)
    add(target, "online", range(8), offline=False)
    step(target)
    for number in range(3):
        add(target, f"offline {number}", [number] * 150)
    assert sum(rows for *_, rows in step(target)) == 451
    assert policy.last.lanes["device"].seconds is None


def test_offline_requests_wait_until_the_whole_online_queue_is_in():
    target, _ = scheduler(tokens=16)
    add(target, "offline", range(8))
    for number in range(3):
        add(target, f"online {number}", [number] * 16, offline=False)
    names = [name for _ in range(3) for name, *_ in step(target)]
    assert "offline" not in names


def test_online_requests_preempt_offline_ones_that_lose_least():
    target, _ = scheduler(blocks=17)
    add(target, "long", range(24), answer=20)
    add(target, "short", range(50, 58), answer=20)
    for _ in range(3):
        step(target)
    add(target, "online", range(200, 224), offline=False)
    step(target)
    assert {seq.request.request_id for seq in target.state.waiting.values()} == {"short"}


@pytest.mark.parametrize("cache", ["true", "false"])
def test_offline_requests_leave_what_online_ones_will_want(cache: str):
    """Online requests have held 20 of 60 blocks of late."""
    target, _ = scheduler(blocks=60, cache=cache)
    add(target, "online", range(76), answer=4, offline=False)
    now = 0.0
    while target.state.all:
        step(target, now := now + 1.0)
    for number in range(7):
        add(target, f"offline {number}", [number] * 33, answer=7)
    for _ in range(6):
        step(target, now := now + 0.1)
    assert 19 <= target.demand.demand <= 30
    held = target.cache.held_blocks
    assert held >= 20, "some of them run"
    assert (held + target.demand.demand <= 60) == (cache == "true")


def test_a_prompt_larger_than_the_threshold_starts_alone():
    target, _ = scheduler(blocks=40, tokens=200)
    add(target, "online", range(120), answer=4, offline=False)
    now = 0.0
    while target.state.all:
        step(target, now := now + 1.0)
    add(target, "offline", range(200, 340), answer=7)
    assert step(target, now + 1.0) == [("offline", 0, 140)]


def test_decodes_come_back_at_once_after_a_busy_iteration():
    target, _ = scheduler(blocks=200, tokens=16)
    for number in range(4):
        add(target, f"offline {number}", [number] * 4, answer=20)
    for _ in range(6):
        step(target)
    add(target, "online", range(100, 116), answer=2, offline=False)
    assert [name for name, *_ in step(target)] == ["online"]
    assert len(step(target)) == 5


def test_a_late_first_token_is_no_slack_for_the_next():
    target, policy = scheduler(slo=Slo(1.0, 0.1))
    add(target, "online", range(8), offline=False)
    for now in (10.0, 10.01):
        step(target, now)
    assert policy.last.lanes["device"].seconds <= 0.1


def test_a_prefix_that_online_requests_share_counts_once():
    target, _ = scheduler(blocks=100, tokens=200)
    for number in range(6):
        add(target, f"online {number}", (*range(120), 500 + number), answer=20, offline=False)
    for _ in range(3):
        step(target)
    add(target, "first", range(300, 320), answer=4)
    add(target, "second", range(400, 420), answer=4)
    for now in (1.0, 2.0):
        step(target, now)
    assert target.state.num_running == 8
    target.demand.observe = lambda now, blocks: seen.append(blocks)
    seen: list[int] = []
    add(target, "third", range(600, 604), answer=4, offline=False)
    plan = target.schedule(3.0)
    online = [seq for seq in target.state.running.values() if seq.order[0] == 0]
    tables = [target.cache.table(seq, len(seq.tokens))[0] for seq in online]
    assert seen == [len(set(chain.from_iterable(tables)))] and plan is not None


def test_a_prompt_goes_on_though_somebody_reads_every_other_block():
    target, _ = scheduler(blocks=40, tokens=14)
    for number in range(9):
        add(target, f"left {number}", [number] * 13, answer=1)
    while target.state.all:
        step(target)
    add(target, "paused", range(100, 121), answer=1)
    step(target)
    for number in range(9):
        add(target, f"reads {number}", [*[number] * 13, 99], answer=1)
    names: set[str] = set()
    while target.state.all:
        names |= {name for name, *_ in step(target)}
    assert "paused" in names and len(names) == 10


def test_the_scheduler_needs_the_estimator():
    with pytest.raises(InvalidRequest, match="needs the estimator"):
        build_policy("echo", {"estimator": "false"})


@pytest.mark.parametrize("predicted", [False, True])
def test_lines_whose_answers_will_be_short_run_together(predicted):
    """Each may make 150 tokens, 38 of 60 blocks, and will make four."""
    target, _ = scheduler(60, tokens=512)
    length = Forecast((4.0,) * 5, 150, "test") if predicted else None
    for number in range(4):
        params = SamplingParams(max_tokens=150, ignore_eos=True)
        prompt = (number,) * 8
        target.add(
            Request(str(number), prompt, params, work_class=WorkClass.OFFLINE, length=length), None
        )
    for _ in range(4):
        step(target)
    assert len(target.state.running) == (4 if predicted else 1)


def test_no_offline_request_is_preempted_for_prompts_that_get_no_time():
    """The first of three online prompts takes all of it, and there are blocks for that."""
    target, _ = scheduler(blocks=100, tokens=512, slo=Slo(1.0, 0.02))
    add(target, "offline", range(100), answer=20)
    step(target)
    add(target, "online", range(200, 208), answer=20, offline=False)
    step(target)
    for number in range(3):
        add(target, f"prompt {number}", [number] * 150, offline=False)
    step(target)
    waiting = {seq.request.request_id for seq in target.state.waiting.values()}
    assert "prompt 2" in waiting and "offline" not in waiting
