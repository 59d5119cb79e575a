"""Offline requests under `unified`: what finds most in the cache first, and room for online."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_echo import DOCUMENT, add, step

from fake_executor import FakeExecutor
from rates import slice_rates
from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo, WorkClass
from tandem.estimators.latency import Rates
from tandem.kv.cache import KVCache
from tandem.kv.eviction import ByClass
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets


def scheduler(blocks: int, tokens: int = 64) -> Scheduler:
    policy = build_policy("unified")
    info = replace(FakeExecutor(blocks, 4, max_model_len=200).info, eos_token_ids=())
    cache = KVCache(blocks, 4, eviction=policy.traits.eviction)
    return Scheduler(policy, cache, Budgets(8, tokens), info, default_slo=Slo(1.0, 1.0))


def test_the_request_that_finds_its_document_starts_before_older_ones():
    target = scheduler(100)
    add(target, "first", (*DOCUMENT, 1), answer=1)
    step(target)
    add(target, "older", range(13))
    add(target, "shares", (*DOCUMENT, 2))
    assert step(target)[0] == ("shares", 12, 1)


def test_many_short_prompts_begin_together():
    target = scheduler(400, tokens=200)
    for number in range(16):
        add(target, f"offline {number}", [number] * 13, answer=1)
    iterations = 0
    while target.state.all:
        step(target)
        iterations += 1
    assert iterations <= 4


def test_offline_requests_leave_what_online_ones_will_want():
    """Online requests have held 20 of 60 blocks of late."""
    target = scheduler(60)
    add(target, "online", range(76), answer=4, offline=False)
    now = 0.0
    while target.state.all:
        step(target, now := now + 1.0)
    for number in range(7):
        add(target, f"offline {number}", [number] * 39, answer=1)
    most = 0
    while target.state.num_waiting:
        step(target, now := now + 0.1)
        most = max(most, target.cache.held_blocks)
    assert 19 <= target.demand.demand <= 30
    assert most + target.demand.demand <= 60


def test_what_shares_nothing_has_its_turn():
    """Of every 101 offline requests that begin one is the one that came first."""
    target = scheduler(100)
    add(target, "first", (*DOCUMENT, 1), answer=1)
    step(target)
    add(target, "alone", range(200, 213), answer=1)
    begun: list[str] = []
    for number in range(140):
        add(target, f"shares {number}", (*DOCUMENT, number), answer=1)
        if number >= 75:  # there are always some that share
            begun += [name for name, *_ in step(target)]
        if "alone" in begun:
            break
    assert 75 <= begun.index("alone") <= 116


def test_blocks_are_evicted_by_class():
    assert isinstance(build_policy("unified").traits.eviction, ByClass)


def test_a_prompt_that_is_computed_piece_by_piece_is_not_starving():
    """Beside an answer that gets less late than the patience allows: each piece uses the share."""
    policy = build_policy("unified", {"patience_s": "0.5", "min_share": "0.1"})
    info = replace(FakeExecutor(400, 4, max_model_len=900).info, eos_token_ids=())
    cache = KVCache(400, 4, eviction=policy.traits.eviction)
    target = Scheduler(policy, cache, Budgets(8, 8), info, default_slo=Slo(1.0, 1.0))
    add(target, "answer", range(5), answer=200, offline=False)
    step(target)
    add(target, "long", range(800), answer=1)
    now, firsts = 0.0, []
    for _ in range(40):
        firsts.append(step(target, now := now + 0.1)[0][0])
    assert set(firsts) == {"answer"}


def test_with_one_place_a_cached_document_goes_before_a_short_prompt():
    """They are of two buckets of lengths, and short prompts are offered first."""
    target = scheduler(100)
    target.budgets = Budgets(1, 64)
    document = tuple(range(40))
    add(target, "first", (*document, 1), answer=1)
    step(target)
    add(target, "short", range(200, 205))
    add(target, "shares", (*document, 2))
    assert step(target)[0][0] == "shares"


@pytest.mark.parametrize("decode_s", [2e-3, 1e-5])
def test_of_equal_prompts_that_with_more_tokens_a_second_starts_first(decode_s):
    """A row of a prompt takes 0.1 ms. Where a decode takes longer, a short answer is worth more."""
    rates = Rates((0.01, decode_s, *[1e-9] * 3, 1e-4, *[1e-9] * 8), slice_rates(), 0.01, 1.0, True)
    policy = build_policy("unified")
    info = replace(FakeExecutor(100, 4, max_model_len=200).info, eos_token_ids=())
    cache = KVCache(100, 4, eviction=policy.traits.eviction)
    target = Scheduler(policy, cache, Budgets(1, 64), info, rates=rates)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    names = ("long", "short") if decode_s > 1e-4 else ("short", "long")
    for first, name in enumerate(names):
        length = Forecast(({"long": 100.0, "short": 4.0}[name],) * 5, 100, "test")
        prompt = tuple(range(first, 20 + first))
        line = Request(name, prompt, params, work_class=WorkClass.OFFLINE, length=length)
        target.add(line, None)
    assert step(target)[0][0] == names[1], "not the one that came first"


def test_a_beginning_that_online_requests_share_is_left_to_them_once():
    """Six held 30 of 100 blocks together; counted for each they would want all of them."""
    target = scheduler(100, tokens=200)
    for number in range(6):
        add(target, f"online {number}", (*range(120), 500 + number), answer=4, offline=False)
    now = 0.0
    while target.state.all:
        step(target, now := now + 1.0)
    for number in range(3):
        add(target, f"offline {number}", [number] * 21, answer=20)
    for _ in range(5):
        step(target, now := now + 0.01)
    assert len(target.state.running) == 3
