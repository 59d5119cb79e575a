"""Order and victims of the shipped policies, and what admission makes of any decision."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_executor import FakeExecutor
from tandem.core.decision import Candidate, Decision
from tandem.core.errors import InvalidRequest
from tandem.core.plan import DrawResult, LanePlan, StepPlan, StepResult
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.kv.cache import KVCache
from tandem.scheduling.registry import build_policy, known_policies
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets, Policy, Traits, View


class Recording:
    """Wraps a policy and remembers its last decision."""

    traits = Traits()

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.last: Decision | None = None

    def decide(self, view: View) -> Decision:
        self.last = self.inner.decide(view)
        return self.last

    @property
    def order(self) -> list[int]:
        assert self.last is not None
        return [c.seq_id for c in self.last.lanes["device"].candidates]


def scheduler(policy: Policy, blocks: int = 100, slots: int = 4, tokens: int = 16) -> Scheduler:
    info = FakeExecutor(blocks, 4, max_model_len=100).info
    return Scheduler(
        policy, KVCache(blocks, 4), Budgets(slots, tokens), replace(info, eos_token_ids=())
    )


def add(target: Scheduler, name: str, prompt: int = 4, priority: int = 0, at: float = 0.0) -> None:
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    tokens = tuple(range(prompt))
    target.add(Request(name, tokens, sampling, priority=priority, arrival_s=at), None)


def run(target: Scheduler, plan: StepPlan | None) -> None:
    assert plan is not None
    lane: LanePlan = plan.lanes[0]
    draws = tuple(DrawResult(draw.seq_id, 1) for span in lane.spans for draw in span.draws)
    target.apply([StepResult(plan.step, lane.lane, 0.0, draws)], 0.0)


def test_fcfs_serves_running_sequences_first_and_never_skips():
    policy = Recording(build_policy("fcfs"))
    target = scheduler(policy, slots=2)
    add(target, "a", at=0.0)
    run(target, target.schedule(0.0))
    for place, name in enumerate("bc"):
        add(target, name, at=1.0 + place)
    plan = target.schedule(0.0)
    assert plan is not None
    assert [span.seq_id for span in plan.lanes[0].spans] == [0, 1]
    assert policy.order[:2] == [0, 1]
    assert policy.last is not None and policy.last.victims == (0,)


def test_priority_orders_by_urgency_then_arrival():
    policy = Recording(build_policy("priority"))
    target = scheduler(policy)
    for name, priority, at in (("a", 1, 0.0), ("b", 0, 2.0), ("c", 0, 1.0), ("d", -3, 9.0)):
        add(target, name, priority=priority, at=at)
    target.schedule(0.0)
    assert policy.order == [3, 2, 1, 0]


def test_long_prompts_are_cut_to_the_token_budget():
    target = scheduler(build_policy("fcfs"), tokens=10)
    add(target, "a", prompt=25)
    lengths = []
    for _ in range(3):
        plan = target.schedule(0.0)
        assert plan is not None
        lengths.append((plan.num_tokens, bool(plan.lanes[0].spans[0].draws)))
        run(target, plan)
    assert lengths == [(10, False), (10, False), (5, True)]


class Whim:
    """A policy that names anything: unknown, doubled and absurd candidates included."""

    traits = Traits()

    def __init__(self, decisions: list[Decision]) -> None:
        self.decisions = decisions

    def decide(self, view: View) -> Decision:
        return self.decisions.pop(0) if self.decisions else Decision()


ids = st.integers(-1, 6)
wishes = st.builds(
    lambda candidates, victims, preempt, evict: Decision(
        lanes=Decision.on_device(tuple(candidates)).lanes,
        victims=tuple(victims),
        preempt=tuple(preempt),
        evict=tuple(evict),
    ),
    st.lists(st.builds(Candidate, ids, st.none() | st.integers(0, 9), st.booleans()), max_size=8),
    st.lists(ids, max_size=6),
    st.lists(ids, max_size=2),
    st.lists(st.integers(0, 20), max_size=4),
)


@settings(max_examples=150)
@given(decisions=st.lists(wishes, max_size=20), blocks=st.integers(10, 24))
def test_no_decision_breaks_a_budget(decisions, blocks):
    target = scheduler(Whim(decisions), blocks=blocks, slots=3, tokens=7)
    for name in range(6):
        add(target, str(name), prompt=3 + name, at=float(name))
    for _ in range(len(decisions)):
        plan = target.schedule(0.0)
        target.cache.check()
        if plan is None:
            continue
        spans = plan.lanes[0].spans
        assert plan.num_tokens <= 7 and len(spans) <= 3
        assert len({span.seq_id for span in spans}) == len(spans)
        assert all(len(span.block_tables[0]) * 4 >= span.end for span in spans)
        run(target, plan)
        target.cache.check()


def test_an_order_of_eviction_is_over_with_its_iteration():
    everybody = Decision.on_device(tuple(Candidate(seq_id) for seq_id in range(4)))
    policy = Whim([everybody, everybody])
    target = scheduler(policy, blocks=4, tokens=100)
    for place in (0, 1):  # each leaves one block
        target.add(Request(str(place), (place,) * 4, SamplingParams(max_tokens=9)), None)
        run(target, target.schedule(0.0))
        target.abort(str(place))
    young = max(target.cache.idle_blocks(), key=lambda block: block.last_access)
    policy.decisions = [replace(everybody, evict=(young.block,)), everybody]
    target.add(Request("2", (2,) * 4, SamplingParams(max_tokens=9)), None)
    run(target, target.schedule(0.0))
    assert target.cache.free_blocks == 1 and target.cache.cached_blocks == 2
    target.add(Request("3", (3,) * 4, SamplingParams(max_tokens=9)), None)
    target.schedule(0.0)
    assert target.cache.idle_blocks() == [young], "the cache's own order: the oldest goes"


def test_a_policy_is_one_file_and_others_come_by_path(monkeypatch):
    assert {"fcfs", "priority"} <= set(known_policies())
    assert isinstance(build_policy(f"{__name__}:Fixed"), Fixed)
    with pytest.raises(InvalidRequest, match=r"no policy 'none-such'; known: .*fcfs"):
        build_policy("none-such")
    for wrong in (":X", ".a:B", "os:sep", "json:nothing", "none.such:X", f"{__name__}:"):
        with pytest.raises(InvalidRequest, match=re.escape(repr(wrong))):
            build_policy(wrong)
    broken = ModuleType("broken")  # is there, but lacks `create`
    monkeypatch.setitem(sys.modules, "tandem.scheduling.policies.broken", broken)
    with pytest.raises(InvalidRequest, match=r"no policy 'broken' .*has no attribute 'create'"):
        build_policy("broken")
    with pytest.raises(InvalidRequest, match="traits"):
        build_policy(f"{__name__}:Unfinished")


class Fixed:
    """Wants nothing."""

    traits = Traits()

    def decide(self, view: View) -> Decision:
        return Decision()


class Unfinished:
    """Decides, but does not say its `traits`."""

    def decide(self, view: View) -> Decision:
        return Decision()
