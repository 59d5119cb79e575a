"""The whole loop over an executor that notices every wrong block."""

from __future__ import annotations

from dataclasses import replace

import learning_bench
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_bench import Bench, check_answer, prompts, request

from fake_executor import EOS
from tandem.core.errors import InvalidRequest, OutOfMemory
from tandem.core.plan import NO_MEMORY, LanePlan
from tandem.core.request import Request
from tandem.core.sequence import FinishReason
from tandem.core.slo import WorkClass
from tandem.core.training import ScoreRequest

actions = st.one_of(
    st.tuples(st.just("add"), prompts, st.integers(1, 3), st.integers(-2, 2), st.integers(1, 20)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 8), st.one_of(st.none(), st.integers(0, 2))),
)


def check_starts(bench: Bench) -> None:
    """All that waits (it is all online) has a time to start by, or has begun."""
    state = bench.loop._scheduler.state
    waiting = sorted(state.waiting.values(), key=lambda seq: seq.seq_id)
    assert state.starts.begun() == [seq for seq in waiting if seq.output_tokens]
    in_time = state.starts.in_time(-1e9, len(waiting))
    assert len(state.starts) == len(waiting) == len(in_time) + len(state.starts.begun())


@settings(max_examples=120)
@given(
    script=st.lists(actions, min_size=1, max_size=25),
    policy=st.sampled_from(["fcfs", "priority", "unified", "adainf", "ekya", "no_retrain"]),
    num_blocks=st.integers(13, 40),
    max_sequences=st.integers(1, 6),
    max_batch_tokens=st.integers(6, 40),
    prefix_caching=st.booleans(),
    runs_ahead=st.booleans(),
    redrawn=st.sampled_from([0, 0, 3]),
)
def test_any_mix_answers_as_if_alone(
    script, policy, num_blocks, max_sequences, max_batch_tokens, prefix_caching, runs_ahead, redrawn
):
    """`redrawn`: one token of so many is another one on the device."""
    bench = Bench(
        num_blocks=num_blocks,
        policy=policy,
        max_sequences=max_sequences,
        max_batch_tokens=max_batch_tokens,
        prefix_caching=prefix_caching,
        runs_ahead=runs_ahead,
    )
    if redrawn:
        bench.executor.redraws = lambda draw: (draw.seq_id + draw.position) % redrawn == 0
    asked: list[Request] = []
    aborted: set[tuple[str, int]] = set()
    for action in script:
        if action[0] == "add":
            _, prompt, n, priority, max_tokens = action
            new = request(f"r{len(asked)}", prompt, n=n, priority=priority, max_tokens=max_tokens)
            asked.append(new)
            bench.loop.add(new)
        elif action[0] == "step":
            for _ in range(action[1]):
                bench.step()
                check_starts(bench)
        else:
            _, which, index = action
            if which < len(asked):
                bench.loop.abort(f"r{which}", index)
                bench.loop._scheduler.cache.check()
                chosen = range(asked[which].n) if index is None else [index]
                aborted |= {(f"r{which}", i) for i in chosen} - bench.ended.keys()
    bench.run()
    for each in asked:
        for index in range(each.n):
            if (each.request_id, index) not in aborted:
                check_answer(bench, each, index)
    assert not aborted & bench.ended.keys(), "an aborted choice said something"


def test_prefix_hits_are_counted_and_used():
    bench = Bench()
    first = request("a", list(range(20)), max_tokens=2, ignore_eos=True)
    bench.loop.add(first)
    bench.run()
    before = sum(plan.num_tokens for plan in bench.plans)
    bench.loop.add(request("b", list(range(20)), max_tokens=2, ignore_eos=True))
    bench.run()
    after = sum(plan.num_tokens for plan in bench.plans) - before
    assert after == before - 16  # 4 of the prompt's 5 blocks; its last token is always computed
    assert bench.loop.stats().prefix_hits_tokens == 16
    assert bench.ended["b", 0].cached_tokens == 16


def test_tenants_do_not_share_blocks():
    bench = Bench()
    bench.loop.add(request("a", list(range(20)), tenant="one"))
    bench.run()
    bench.loop.add(request("b", list(range(20)), tenant="two"))
    bench.run()
    assert bench.loop.stats().prefix_hits_tokens == 0


def test_priority_preempts_and_the_victim_resumes():
    bench = Bench(num_blocks=14, policy="priority", max_sequences=2)
    slow = request("slow", [1] * 20, priority=5, max_tokens=20, ignore_eos=True)
    bench.loop.add(slow)
    for _ in range(6):
        bench.step()
    urgent = request("urgent", [2] * 20, priority=0, max_tokens=10, ignore_eos=True)
    bench.loop.add(urgent)
    bench.run()
    order = list(bench.ended)
    assert order == [("urgent", 0), ("slow", 0)]
    assert bench.loop.stats().preemptions >= 1
    check_answer(bench, slow, 0)
    check_answer(bench, urgent, 0)


def test_priority_takes_the_only_slot():
    bench = Bench(policy="priority", max_sequences=1)
    bench.loop.add(request("slow", [1] * 4, priority=1, max_tokens=20, ignore_eos=True))
    bench.step()
    bench.loop.add(request("urgent", [2] * 4, priority=0, max_tokens=2, ignore_eos=True))
    bench.run()
    assert list(bench.ended) == [("urgent", 0), ("slow", 0)]


def test_preempted_work_keeps_its_blocks_while_nobody_needs_them():
    bench = Bench(policy="priority", max_sequences=1)
    bench.loop.add(request("slow", [1] * 16, priority=1, max_tokens=9, ignore_eos=True))
    for _ in range(4):
        bench.step()
    bench.loop.add(request("urgent", [2] * 4, priority=0, max_tokens=2, ignore_eos=True))
    bench.run()
    computed = sum(len(s.tokens) for p in bench.plans for s in p.spans if s.start < 16)
    assert computed < 16 + 4 + 8, "the long prompt was computed again"


def test_fcfs_preempts_the_latest_when_blocks_run_out():
    bench = Bench(num_blocks=16, max_sequences=4)
    for name in ("a", "b", "c"):
        bench.loop.add(request(name, [ord(name)] * 4, max_tokens=24, ignore_eos=True))
    bench.run()
    assert bench.loop.stats().preemptions > 0
    assert next(iter(bench.ended)) == ("a", 0)


def test_prompt_scores_come_whole_and_once():
    bench = Bench(max_batch_tokens=6)
    prompt = list(range(21))
    for name in ("a", "b"):  # the second may not take scored positions from the cache
        bench.loop.add(request(name, prompt, prompt_logprobs=1, max_tokens=3))
        bench.run()
        assert bench.scored[name] == prompt[1:]


def test_choices_share_the_prompt():
    bench = Bench(max_batch_tokens=64)
    asked = request("a", list(range(22)), n=4, max_tokens=5, ignore_eos=True)
    bench.loop.add(asked)
    bench.run()
    for index in range(4):
        check_answer(bench, asked, index)
    assert sum(len(s.tokens) for p in bench.plans for s in p.spans) == 22 + 4 * 4
    assert sum(len(p.copies) for p in bench.plans) == 3  # the last to write keeps the original


def test_min_tokens_bans_the_end():
    bench = Bench()
    for seed in range(30):
        bench.loop.add(request(f"r{seed}", [1], seed=seed, min_tokens=4, max_tokens=6))
    bench.run()
    for seed in range(30):
        assert EOS not in bench.tokens[f"r{seed}", 0][:4]


def test_later_choices_are_not_overtaken():
    bench = Bench(max_sequences=1)
    bench.loop.add(request("a", [1], n=2, max_tokens=4, ignore_eos=True))
    bench.step()
    for name in "bcd":
        bench.loop.add(request(name, [2], max_tokens=4, ignore_eos=True))
    bench.run()
    assert list(bench.ended)[:2] == [("a", 0), ("a", 1)]


def test_blocks_of_a_failed_sequence_are_not_reused():
    bench = Bench(max_batch_tokens=8)
    bench.loop.add(request("bad", list(range(20))))
    bench.step()  # the first chunk succeeds and is committed
    bench.executor.failing = {0}
    bench.run()
    assert bench.ended["bad", 0].error == "asked to fail"
    assert bench.cache.cached_blocks == 0
    bench.loop.add(request("again", list(range(20))))
    bench.run()
    assert bench.ended["again", 0].cached_tokens == 0


def test_a_failed_sequence_ends_alone():
    bench = Bench()
    bench.loop.add(request("bad", [1, 2], n=2))
    bench.loop.add(good := request("good", [3, 4]))
    bench.executor.failing = {0}
    bench.run()
    assert bench.ended["bad", 0].finish_reason is FinishReason.ERROR
    assert bench.ended["bad", 1].error == "asked to fail"
    check_answer(bench, good, 0)


def test_a_failed_iteration_ends_its_sequences_only():
    bench = Bench()
    boom = [True]

    def explode(plan: LanePlan) -> None:
        if boom.pop() if boom else False:
            raise RuntimeError("out of memory")

    bench.executor._on_submit = explode
    bench.loop.add(request("bad", [1, 2]))
    bench.step()
    assert "out of memory" in (bench.ended["bad", 0].error or "")
    bench.loop.add(good := request("good", [3, 4]))
    bench.run()
    check_answer(bench, good, 0)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "needle"),
    [([], 4, "empty"), ([1] * 64, 4, "context"), ([1] * 40, 60, "KV cache")],
)
def test_what_can_never_run_is_refused(prompt, max_tokens, needle):
    bench = Bench(num_blocks=12)
    with pytest.raises(InvalidRequest, match=needle):
        bench.loop.add(request("a", prompt, max_tokens=max_tokens))
    assert not bench.loop.has_work


def test_what_online_requests_hold_is_looked_at_once_a_second_and_reported(monkeypatch):
    bench = Bench()
    looks, observe = [], bench.scheduler.demand.observe
    monkeypatch.setattr(
        bench.scheduler.demand,
        "observe",
        lambda now, blocks: (looks.append(blocks), observe(now, blocks)),
    )
    offline = replace(request("off", [5, 5], max_tokens=9), work_class=WorkClass.OFFLINE)
    for asked in (request("a", [1, 2, 3], max_tokens=40, ignore_eos=True), offline):
        bench.loop.add(asked)
    bench.run()
    assert bench.loop.stats().iterations == 40
    # Each 0.1 s a token: the prompt's block, then those of 13, 23 and 33 tokens.
    assert looks == [1, 4, 6, 9]
    mean = (1 + 4 + 6) / 3
    found = bench.loop.stats().prediction_errors["online_blocks"]
    assert found.samples == 3
    assert found.p95 == max(3 / 4, 3.5 / 6, (9 - mean) / 9)


def test_a_shortage_of_learning_alone_ends_no_engine():
    """Samples that never find memory must not end the requests beside, again and again."""
    bench = learning_bench.Bench()
    bench.executor.fails_for, bench.executor.failing = NO_MEMORY, set(range(100))
    for number in range(6):
        bench.loop.teaching.add_score(ScoreRequest(f"s{number}", (1, 2, 3, 4), 2))
        bench.run()
        assert bench.failures[f"s{number}"] == NO_MEMORY and not bench.loop.exhausted
    for number in range(3):  # and it hides none of theirs
        bench.loop.add(learning_bench.request(f"r{number}", (1, 2, 3)))
        bench.run()
        bench.loop.teaching.add_score(ScoreRequest(f"t{number}", (1, 2, 3, 4), 2))
        bench.run()
    assert bench.loop.exhausted


def test_a_shortage_of_memory_ends_its_requests_and_is_told_once_it_stays():
    bench, short = Bench(), [True]

    def on_submit(plan):
        if short[0]:
            raise OutOfMemory(NO_MEMORY)

    bench.executor._on_submit = on_submit
    for number in range(2):
        bench.loop.add(request(f"a{number}", [1, 2, 3]))
        bench.run()
        assert bench.ended[f"a{number}", 0].error == NO_MEMORY
    short[0] = False
    bench.loop.add(request("b", [1, 2, 3]))
    bench.run()
    assert bench.ended["b", 0].error is None and not bench.loop.exhausted
    short[0] = True
    for number in range(3):
        assert not bench.loop.exhausted
        bench.loop.add(request(f"c{number}", [1, 2, 3]))
        bench.run()
    assert bench.loop.exhausted
