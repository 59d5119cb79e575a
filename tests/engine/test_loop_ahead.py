"""Plans that are made and given to the device before the results of the plan before are there."""

from __future__ import annotations

import pytest
from loop_bench import Bench, check_answer, request
from test_loop_adapters import write_adapter

from fake_answers import VOCAB, expected_tokens
from fake_executor import EOS
from tandem.core.errors import OutOfMemory
from tandem.core.plan import NO_MEMORY, UNDRAWN, Draw
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.engine.loop import EngineLoop
from tandem.engine.probe import LoopProbe

PROMPT = [1, 2, 3]


def ahead(bench: Bench) -> list[int]:
    """Numbers of the plans that followed another one."""
    return [number for number, plan in enumerate(bench.plans) if plan.follows]


def stopping(after: int) -> list[int]:
    """A prompt whose answer ends by itself after so many tokens."""
    for first in range(VOCAB):
        for second in range(VOCAB):
            draw = Draw(0, 0, 0, SamplingParams())
            found = expected_tokens([first, second], draw, None, after + 1, frozenset({EOS}))
            if len(found) == after and found[-1] == EOS:
                return [first, second]
    raise AssertionError("there is none")


def test_the_next_decode_is_given_before_the_last_one_is_known():
    bench = Bench(runs_ahead=True)
    bench.loop.add(asked := request("a", PROMPT, max_tokens=6, ignore_eos=True))
    bench.step()
    bench.step()
    assert len(bench.plans) == 3 and len(bench.tokens["a", 0]) == 2
    assert bench.plans[2].spans[0].tokens == (UNDRAWN,)
    bench.run()
    check_answer(bench, asked, 0)
    assert len(bench.plans) == 6, "nothing is computed past the last token that is known before"
    assert ahead(bench) == [2, 3, 4, 5]


def test_without_a_device_that_runs_ahead_nothing_follows():
    bench = Bench()
    bench.loop.add(request("a", PROMPT))
    bench.run()
    assert ahead(bench) == []


def test_an_answer_that_ends_keeps_its_blocks_until_the_plan_in_flight_has_landed():
    bench = Bench(runs_ahead=True)
    bench.loop.add(ends := request("ends", stopping(4), max_tokens=20))
    bench.loop.add(goes_on := request("goes on", PROMPT, max_tokens=20, ignore_eos=True))
    while ("ends", 0) not in bench.ended:
        bench.step()
    (flying,) = bench.scheduler.flight.plans
    assert len(flying.lanes[0].spans) == 2
    held = bench.cache.held_blocks
    bench.step()
    assert bench.cache.held_blocks < held
    assert [len(plan.spans) for plan in bench.plans[-2:]] == [2, 1]
    bench.run()
    check_answer(bench, ends, 0)
    check_answer(bench, goes_on, 0)


def test_the_last_answer_to_end_leaves_a_plan_that_is_taken_in():
    bench = Bench(runs_ahead=True)
    bench.loop.add(ends := request("ends", stopping(4), max_tokens=20))
    while not bench.ended:
        bench.step()
    assert bench.scheduler.flight.plans and bench.loop.has_work and bench.cache.held_blocks
    bench.step()
    assert not bench.loop.has_work and not bench.cache.held_blocks
    check_answer(bench, ends, 0)


def test_a_token_that_is_redrawn_is_computed_again():
    bench = Bench(runs_ahead=True)
    bench.executor.redraws = lambda draw: draw.seq_id == 0 and draw.position == 2
    asked = [request(name, PROMPT, max_tokens=8, ignore_eos=True) for name in "ab"]
    for each in asked:
        bench.loop.add(each)
    bench.run()
    for each in asked:
        check_answer(bench, each, 0)
    starts = [span.start for plan in bench.plans for span in plan.spans if span.seq_id == 0]
    again = len(PROMPT) + 2
    assert starts.count(again) == 2 and len(starts) == len(set(starts)) + 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 1},
        {"presence_penalty": 0.5},
        {"min_tokens": 20},
    ],
    ids=str,
)
def test_what_needs_more_of_a_plan_than_its_tokens_waits_for_it(sampling):
    bench = Bench(runs_ahead=True)
    bench.loop.add(request("plain", PROMPT, max_tokens=20, ignore_eos=True))
    bench.loop.add(request("more", PROMPT, max_tokens=8, ignore_eos=True, **sampling))
    while ("more", 0) not in bench.ended:
        bench.step()
        assert ahead(bench) == []
    bench.run()
    assert ahead(bench)


def test_a_request_that_comes_is_planned_after_the_plan_in_flight():
    bench = Bench(runs_ahead=True)
    first = request("first", PROMPT, max_tokens=20, ignore_eos=True)
    bench.loop.add(first)
    bench.step()
    bench.step()
    bench.loop.add(second := request("second", [3, 2, 1], max_tokens=5, ignore_eos=True))
    bench.step()
    assert len(bench.plans) == 3 and not bench.scheduler.flight.plans
    bench.step()
    assert len(bench.plans[3].spans) == 2 and not bench.plans[3].follows
    bench.run()
    check_answer(bench, first, 0)
    check_answer(bench, second, 0)


def test_without_a_free_block_the_next_plan_waits_for_a_decision():
    """Two answers fill the cache: one is preempted, by the policy."""
    bench = Bench(num_blocks=16, runs_ahead=True)
    asked = [request(name, [*PROMPT, n], max_tokens=30, ignore_eos=True)
             for n, name in enumerate("ab")]  # fmt: skip
    for each in asked:
        bench.loop.add(each)
    bench.run()
    assert bench.scheduler.preemptions
    for each in asked:
        check_answer(bench, each, 0)


def test_where_not_all_decodes_fit_into_a_plan_each_is_decided():
    """Six choices of one prompt, and four rows."""
    bench = Bench(max_sequences=8, max_batch_tokens=4, runs_ahead=True)
    bench.loop.add(asked := request("r", PROMPT, n=6, max_tokens=6, ignore_eos=True))
    bench.step()
    for _ in range(4):
        bench.step()
        assert len(bench.scheduler.state.running) == 6 and not ahead(bench)
    bench.run()
    for index in range(6):
        check_answer(bench, asked, index)


def test_a_plan_that_cannot_be_given_ahead_is_made_again(caplog):
    bench = Bench(runs_ahead=True)
    bench.loop.add(asked := request("a", PROMPT, max_tokens=6, ignore_eos=True))
    given = bench.executor._on_submit

    def refuse(plan):
        if plan.follows and plan.spans[0].start == 5:
            raise RuntimeError("in parts")
        given(plan)

    bench.executor._on_submit = refuse
    bench.run()
    check_answer(bench, asked, 0)
    assert "was not given ahead" in caplog.text
    assert [plan.spans[0].start for plan in bench.plans] == [0, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("whole", [False, True], ids=["one sequence", "the whole plan"])
def test_a_failure_ends_what_failed_though_the_next_plan_has_it(whole):
    bench = Bench(runs_ahead=True)
    asked = [request(name, PROMPT, max_tokens=8, ignore_eos=True) for name in "ab"]
    for each in asked:
        bench.loop.add(each)
    while not ahead(bench):
        bench.step()
    if whole:
        poll = bench.executor.poll

        def broken():
            bench.executor.poll = poll
            poll()
            raise OutOfMemory(NO_MEMORY)

        bench.executor.poll = broken
        bench.step()
    else:
        bench.executor.failing.add(0)
    bench.run()
    failed = {
        key for key, event in bench.ended.items() if event.finish_reason is FinishReason.ERROR
    }
    assert failed == ({("a", 0), ("b", 0)} if whole else {("a", 0)})
    if not whole:
        check_answer(bench, asked[1], 0)


@pytest.mark.parametrize("where", ["submit", "submit ahead", "poll"])
def test_after_an_interrupt_the_loop_goes_on(where):
    """As of an engine in a notebook."""
    bench = Bench(runs_ahead=True)
    bench.loop.add(request("a", PROMPT, max_tokens=20, ignore_eos=True))
    submit, poll = bench.executor.submit, bench.executor.poll
    while not ahead(bench):
        bench.step()
    if where == "submit":
        bench.loop.runs_ahead = False
        bench.step()

    def interrupt(*args):
        bench.executor.submit, bench.executor.poll = submit, poll
        raise KeyboardInterrupt

    setattr(bench.executor, where.split()[0], interrupt)
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.loop.runs_ahead = True
    bench.loop.abort("a")
    bench.loop.add(asked := request("b", PROMPT, max_tokens=8, ignore_eos=True))
    bench.run()
    check_answer(bench, asked, 0)


def test_what_an_aborted_request_held_is_dropped_when_the_plan_in_flight_has_landed(tmp_path):
    bench = Bench(runs_ahead=True)
    version = bench.loop.adapters.load("A", write_adapter(tmp_path / "A", "weights"))
    bench.loop.add(request("a", PROMPT, adapter="A", max_tokens=20, ignore_eos=True))
    bench.loop.add(kept := request("b", PROMPT, max_tokens=20, ignore_eos=True))
    while not ahead(bench):
        bench.step()
    bench.loop.adapters.unload("A")
    bench.loop.abort("a")
    assert version.content_hash in bench.executor.adapters, "the plan in flight reads it"
    said = len(bench.tokens["a", 0])
    bench.step()
    assert version.content_hash not in bench.executor.adapters
    bench.run()
    assert len(bench.tokens["a", 0]) == said and ("a", 0) not in bench.ended
    check_answer(bench, kept, 0)


def test_policy_and_time_model_know_the_plan_that_was_decided():
    """Plans that follow are no samples: their time is not one on an idle device."""
    bench = Bench(runs_ahead=True)
    observed = []
    bench.scheduler.latency.observe = lambda lane, *rest: observed.append(lane)
    bench.loop.add(request("a", PROMPT, max_tokens=6, ignore_eos=True))
    bench.run()
    assert len(bench.plans) == 6 and observed == bench.plans[:2]
    seen = []
    decide = bench.scheduler._policy.decide

    def spy(view):
        seen.append(view.last_plan)
        return decide(view)

    bench.scheduler._policy.decide = spy
    bench.loop.add(request("b", PROMPT, max_tokens=3, ignore_eos=True))
    bench.run()
    assert seen[0].lanes[0] == bench.plans[1] and len(bench.plans) == 9


def test_a_loop_that_lands_leaves_nothing_to_the_next_one_on_its_executor():
    bench = Bench(runs_ahead=True)
    bench.loop.add(request("a", PROMPT, max_tokens=20, ignore_eos=True))
    while not ahead(bench):
        bench.step()
    (event,) = bench.loop.land()
    assert event.tokens and bench.loop.land() == [] and bench.loop.runs_ahead
    bench.loop.abort("a")
    assert not bench.cache.held_blocks
    other = Bench(runs_ahead=True)
    other.loop._executor = other.executor = bench.executor
    other.loop.add(asked := request("b", PROMPT, max_tokens=4, ignore_eos=True))
    other.run()
    check_answer(other, asked, 0)


def test_no_plan_follows_where_requests_switch_versions_or_passes_are_measured():
    bench = Bench(runs_ahead=True)
    assert bench.loop.runs_ahead
    assert not EngineLoop(bench.scheduler, bench.executor, bench.clock, switch=True).runs_ahead
    LoopProbe(bench.loop)
    assert not bench.loop.runs_ahead
