"""Requests start under `unified` when the predicted peak of the KV memory allows it: not with what
they may need at most, and not with what they hold now."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policies import run

from fake_executor import FakeExecutor
from tandem.core.decision import Decision
from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo, WorkClass
from tandem.estimators.memory import Peak
from tandem.kv.cache import KVCache
from tandem.scheduling.policies.unified.memory import EndTables, PeakMemory
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets, View

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


def ids(target: Scheduler) -> set[str]:
    """The requests that run."""
    return {seq.request.request_id for seq in target.state.running.values()}


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


@settings(max_examples=60)
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


@pytest.mark.parametrize("kind", [WorkClass.OFFLINE, WorkClass.ONLINE])
def test_a_cached_prefix_is_as_much_as_one_that_was_computed(kind) -> None:
    """A prefix of 30 of 60 blocks that one request holds alone is free once that one ends."""
    running = []
    for cached in (False, True):
        target, prefix = scheduler(60), tuple(range(1000, 1120))
        if cached:
            add(target, 8, 4, surely(4), prompt=prefix, work_class=kind)
            to_the_end(target)
        add(target, 9, 4, surely(4), prompt=(*prefix, 1, 2, 3, 4), work_class=kind)
        step(target)
        step(target)
        step(target)
        add(target, 1, 112, surely(112), work_class=kind)
        step(target)
        running.append("1" in ids(target))
        to_the_end(target)
        assert target.preemptions == 0
    assert running == [True, True]


def test_a_prefix_of_an_offline_request_keeps_no_online_request_out() -> None:
    """The prefix has 40 of 60 blocks. Each of four online requests has 12 at its end."""
    target, prefix = scheduler(60), tuple(range(1000, 1160))
    add(target, 8, 4, surely(4), prompt=prefix, work_class=WorkClass.OFFLINE)
    to_the_end(target)
    add(target, 9, 60, surely(60), prompt=(*prefix, 10), work_class=WorkClass.OFFLINE)
    for _ in range(4):
        step(target)
    for number in range(4):
        add(target, number, 40, surely(40))
    for _ in range(3):
        step(target)
    assert {"0", "1", "2", "3"} <= ids(target)
    to_the_end(target)


def test_a_prefix_that_an_offline_request_holds_counts_as_memory_of_a_waiting_one() -> None:
    """The offline request is preempted, and its prefix then belongs to the online one alone."""
    target, prefix = scheduler(60), tuple(range(1000, 1120))
    add(target, 9, 60, surely(60), prompt=(*prefix, 10), work_class=WorkClass.OFFLINE)
    for _ in range(4):
        step(target)
    add(target, 0, 100, surely(100))  # 27 blocks at its end
    add(target, 1, 100, surely(100), prompt=(*prefix, 11))  # 56
    step(target)
    assert "0" in ids(target) and "1" not in ids(target)
    to_the_end(target)


def test_the_first_offline_request_that_starts_without_memory_counts() -> None:
    """Beside an online request with 30 of 60 blocks at its end, one that will have 34 starts all
    the same. Another one, with 21, then waits; without the first it would fit."""
    target = scheduler(60)
    add(target, 0, 112, surely(112))
    for _ in range(3):
        step(target)
    kind = WorkClass.OFFLINE
    add(target, 1, 106, surely(106), prompt=tuple(range(500, 530)), work_class=kind)
    add(target, 2, 60, surely(60), prompt=tuple(range(600, 624)), work_class=kind)
    step(target)
    assert ids(target) == {"0", "1"}
    to_the_end(target)


def test_a_long_prompt_with_a_short_answer_may_fit_where_a_short_one_with_a_long_one_does_not():
    """Of 40 blocks one holds 20 at its end. The first that waits would have 32, the second 12."""
    target = scheduler(40)
    kind = WorkClass.OFFLINE
    add(target, 0, 72, surely(72), work_class=kind)
    step(target)
    add(target, 1, 120, surely(120), work_class=kind)
    add(target, 2, 4, surely(4), prompt=tuple(range(500, 544)), work_class=kind)
    first, second = target.state.waiting.values()
    (running,) = target.state.running.values()
    tried: list[bool] = []

    class Looks:
        traits = build_policy("unified").traits

        def decide(self, view: View) -> Decision:
            memory = PeakMemory(view, EndTables(), [running])
            tried.extend([memory.try_count(first), memory.try_count(second)])
            tried.append(memory.try_count(first))
            return Decision.on_device(())

    target._policy = Looks()
    target.schedule(0.1)
    assert tried == [False, True, False], "it has more now, and less at its end"


def test_peaks_are_computed_for_few_that_do_not_fit(monkeypatch) -> None:
    computed = []
    peak = Peak.tokens_with
    monkeypatch.setattr(
        Peak, "tokens_with", lambda self, more: computed.append(1) or peak(self, more)
    )
    target = scheduler(40)
    for number in range(2):
        add(target, number, 60, surely(60), work_class=WorkClass.OFFLINE)
    step(target)
    for number in range(2, 60):
        prompt = tuple(range(1000 * number, 1000 * number + 70 - number))
        add(target, number, 80, surely(80), prompt=prompt, work_class=WorkClass.OFFLINE)
    computed.clear()
    step(target)
    assert 1 <= len(computed) <= 4


def test_where_an_answer_may_end_is_computed_again_when_that_changes(monkeypatch) -> None:
    computed = []
    ends = Forecast.ends
    monkeypatch.setattr(
        Forecast, "ends", lambda self, made: computed.append(made) or ends(self, made)
    )
    target, tables = scheduler(60), EndTables()
    length = Forecast((5.0, 9.0, 14.0, 20.0, 30.0), 300, "test")
    add(target, 0, 60, length)
    (seq,) = target.state.waiting.values()
    for _ in range(40):
        found = tables.of(seq, length)
        assert [each[0] for each in found] == [end for end, _ in ends(length, seq.output_tokens)]
        seq.tokens.append(1)
    assert computed[:6] == [0, 5, 9, 14, 20, 30]
    assert tables.of(seq, surely(50))[-1][0] == 50.0
