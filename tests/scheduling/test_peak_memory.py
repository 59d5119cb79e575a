"""Requests start under `unified` when the predicted peak of the KV memory allows it: not with what
they may need at most, and not with what they hold now."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policies import run

from fake_executor import FakeExecutor
from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo, WorkClass
from tandem.kv.cache import KVCache
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets

SIZE = 4


def scheduler(blocks: int) -> Scheduler:
    policy = build_policy("unified")
    info = replace(FakeExecutor(blocks, SIZE, max_model_len=400).info, eos_token_ids=())
    cache = KVCache(blocks, SIZE, eviction=policy.traits.eviction)
    return Scheduler(policy, cache, Budgets(16, 64), info, default_slo=Slo(9.0, 9.0))


def surely(tokens: float) -> Forecast:
    """It ends there, whatever happens."""
    return Forecast((tokens,) * 5, int(tokens), "test")


def add(
    target: Scheduler, number: int, answer: int, length: Forecast | None, **fields: object
) -> None:
    prompt = tuple(range(10 * number, 10 * number + 8))
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    request = Request(str(number), prompt, params, length=length, arrival_s=0.001 * number)
    target.add(replace(request, **fields), None)  # type: ignore[arg-type]


def step(target: Scheduler) -> int:
    """One iteration; how many requests run after it."""
    run(target, target.schedule(0.1))
    target.cache.check()
    return len(target.state.running)


def to_the_end(target: Scheduler) -> int:
    """Iterations until all has ended."""
    iterations = 0
    while target.state.all:
        step(target)
        iterations += 1
        assert iterations < 5_000
    return iterations


@pytest.mark.parametrize("kind", [WorkClass.ONLINE, WorkClass.OFFLINE])
def test_what_would_not_fit_at_its_peak_waits_and_nothing_is_preempted(kind) -> None:
    """Twenty blocks; each answer grows to twelve. Greedily, a second one starts at once."""
    preempted = {}
    for name, length in (("greedy", None), ("predicted", surely(40))):
        target = scheduler(20)
        for number in range(4):
            add(target, number, 40, length, work_class=kind)
        running = step(target)
        assert (running == 1) == (name == "predicted")
        to_the_end(target)
        preempted[name] = target.preemptions
    assert preempted["greedy"] > 0 and preempted["predicted"] == 0


def test_what_may_be_long_but_will_be_short_does_not_wait() -> None:
    """Each may make 300 tokens, 75 blocks, and will make four."""
    target = scheduler(20)
    short = Forecast((4.0,) * 5, 300, "test")
    for number in range(3):
        add(target, number, 4, short)
    assert step(target) == 3
    to_the_end(target)
    assert target.preemptions == 0


def test_one_that_ends_leaves_its_blocks_to_one_that_grows() -> None:
    """Of 20 blocks the first has ten when it ends. The second has four then, and twelve at its
    end: more than the rest, but not more than there are."""
    target = scheduler(20)
    add(target, 0, 32, surely(32))
    for _ in range(20):
        assert step(target) == 1
    add(target, 1, 40, surely(40))
    assert step(target) == 2
    to_the_end(target)
    assert target.preemptions == 0


def test_a_request_for_which_there_is_no_memory_starts_when_nothing_runs() -> None:
    target = scheduler(20)
    add(target, 0, 8, surely(300))
    add(target, 1, 8, surely(300))
    assert step(target) == 1
    to_the_end(target)


def test_what_is_foreseen_of_a_running_request_counts_from_then_on() -> None:
    target = scheduler(20)
    add(target, 0, 12, surely(60))
    step(target)
    add(target, 1, 12, surely(60))
    assert step(target) == 1
    target.foresee("0", surely(12))
    target.foresee("unknown", surely(12))
    assert step(target) == 2
    to_the_end(target)
    assert target.preemptions == 0


def test_no_later_request_starts_before_one_that_has_no_memory() -> None:
    target = scheduler(20)
    add(target, 0, 40, surely(40))
    step(target)
    add(target, 1, 40, surely(40))
    add(target, 2, 1, surely(1))
    order = []
    while target.state.all:
        step(target)
        running = [seq.request.request_id for seq in target.state.running.values()]
        order += [each for each in running if each not in order]
    assert order[:2] == ["0", "1"]
    assert target.preemptions == 0


def test_all_choices_of_a_request_count() -> None:
    target = scheduler(40)
    add(target, 0, 40, surely(40))
    step(target)
    add(target, 1, 40, surely(40), n=3)
    assert step(target) == 1, "12 blocks, and three times ten beside two of a prompt"
    add(target, 2, 40, surely(40), n=2)
    to_the_end(target)
    assert target.preemptions == 0


def test_a_shared_prompt_counts_once() -> None:
    """Six requests share a prompt of 32 of 48 blocks and hold two more each at their ends."""
    target, prompt = scheduler(48), tuple(range(129))
    for number in range(6):
        add(target, number, 7, surely(7), prompt=prompt)
        running = step(target)
    assert running == 6
    to_the_end(target)
    assert target.preemptions == 0


LENGTHS = st.lists(st.integers(1, 90), min_size=5, max_size=5).map(sorted)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.none() | LENGTHS, st.booleans(), st.integers(1, 3)),
        min_size=1,
        max_size=12,
    ),
    st.integers(20, 60),
)
def test_whatever_is_predicted_every_request_ends(requests, blocks) -> None:
    """Forecasts that are far too short cost preemptions; those that are far too long, time."""
    target = scheduler(blocks)
    for number, (answer, lengths, offline, choices) in enumerate(requests):
        length = lengths and Forecast(tuple(map(float, lengths)), 90, "test")
        kind = WorkClass.OFFLINE if offline else WorkClass.ONLINE
        add(target, number, answer, length, work_class=kind, n=choices)
        step(target)
    to_the_end(target)
