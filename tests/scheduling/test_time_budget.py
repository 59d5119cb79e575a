"""A policy may bound the predicted time of an iteration: what is granted then."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fake_executor import FakeExecutor
from rates import slice_rates
from tandem.core.clock import VirtualClock
from tandem.core.decision import Candidate, Decision, SliceCandidate
from tandem.core.plan import DEVICE_LANE, LanePlan
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import WorkClass
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    Role,
    ScoreRequest,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.engine.loop import EngineLoop
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.work import PassWork
from tandem.kv.cache import KVCache
from tandem.scheduling.registry import build_policy, known_policies
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets, Policy, Traits, View

BLOCK = 4
# Every term counts, draws and scores as much as rows, and prompts and decodes overlap in part.
RATES = Rates(
    forward=(
        0.02, 0.002, 0.1, 0.05, 0.05, 0.001, 20.0, 0.003, 0.002, 0.004, 0.001, 0.002, 0.0005, 0.003,
    ),
    slices=slice_rates(
        slice=0.002,
        layer=0.003,
        layer_row=0.0003,
        again=0.001,
        again_row=0.0002,
        rest_row=0.0001,
        first=0.002,
        first_row=0.0002,
    ),
    update_s=0.01,
    rho=0.3,
    measured=True,
    slices_measured=True,
)  # fmt: skip


class Bounded:
    """What another policy wants, within a number of seconds that is different each time."""

    traits = Traits()

    def __init__(self, inner: Policy, budgets: list[float | None]) -> None:
        self.inner, self.budgets, self.asked = inner, budgets, 0
        self.seconds: float | None = None

    def decide(self, view: View) -> Decision:
        decision = self.inner.decide(view)
        self.seconds = self.budgets[self.asked % len(self.budgets)]
        self.asked += 1
        lanes = {name: replace(lane, seconds=self.seconds) for name, lane in decision.lanes.items()}
        return replace(decision, lanes=lanes)


class Bench:
    """A loop over the fake device, whose policy is `Bounded`; all plans with their predictions."""

    def __init__(self, policy: Policy, num_blocks: int = 64, tokens: int = 32) -> None:
        self.plans: list[LanePlan] = []
        self.predicted: list[float] = []
        self.clock = VirtualClock()
        executor = FakeExecutor(num_blocks, on_submit=self.see, clock=self.clock)
        self.scheduler = Scheduler(
            policy, KVCache(num_blocks, BLOCK), Budgets(8, tokens), executor.info, rates=RATES
        )
        self.policy = policy
        self.loop = EngineLoop(self.scheduler, executor, self.clock, check_every_step=True)

    def see(self, plan: LanePlan) -> None:
        latency, learning = self.scheduler.latency, self.scheduler.learning
        seconds = latency.forward_s(PassWork.of(plan))
        for piece in plan.slices:
            seconds += latency.slice_s(learning.backward_of(piece.micro_batch), piece.hi - piece.lo)
        seconds += latency.update_s() * len(plan.updates)
        self.plans.append(plan)
        self.predicted.append(seconds)

    def step(self) -> LanePlan:
        self.clock.advance(0.05)
        self.loop.step()
        return self.plans[-1]


def request(name: str, prompt: int, output: int = 6, n: int = 1, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=output, ignore_eos=True, **sampling)
    return Request(name, tuple((ord(name[0]) + row) % 40 for row in range(prompt)), params, n=n)


def training(name: str, lengths: list[int]) -> TrainingStep:
    sequences = tuple(
        TrainingSequence(tuple((place + row) % 40 for row in range(length)), 2, Role.TARGET)
        for place, length in enumerate(lengths)
    )
    return TrainingStep(name, "t", LossSpec(LossKind.SFT), (sequences,))


def is_least_piece(plan: LanePlan) -> bool:
    """A decode or a block's rows; a layer; an update."""
    pieces = len(plan.spans) + len(plan.slices) + len(plan.updates)
    return (
        pieces == 1
        and plan.num_tokens <= BLOCK
        and all(piece.hi - piece.lo == 1 for piece in plan.slices)
    )


requests = st.builds(
    lambda name, prompt, output, n, logprobs, work_class: replace(
        request(f"{name}", prompt, output, n, prompt_logprobs=logprobs), work_class=work_class
    ),
    st.sampled_from("abc"), st.integers(1, 40), st.integers(1, 12), st.integers(1, 3),
    st.sampled_from([None, None, 0]), st.sampled_from([WorkClass.ONLINE, WorkClass.OFFLINE]),
)  # fmt: skip


def first_plan_of_a_step(seconds: float | None) -> tuple[LanePlan, float, LatencyModel]:
    """What is planned of twelve rows that are alone, its prediction, and the model."""
    bench = Bench(Bounded(build_policy("unified"), [seconds]), 64)
    bench.loop.teaching.open_trainer(TrainerSpec("t", LoraSpec()))
    bench.loop.teaching.add_step(training("s", [12]))
    plan = bench.step()
    return plan, bench.predicted[0], LatencyModel(RATES)


def test_a_recording_that_may_keep_more_is_granted_the_time_for_it():
    """There is time for twelve rows alone in their pass, but not if more is kept of them."""
    plan, whole_s, latency = first_plan_of_a_step(None)
    work = PassWork.of(plan)
    assert work.whole and work.recorded == 11  # the last token is a target only
    work.whole = False
    seconds = 0.5 * (whole_s + latency.forward_s(work))
    plan, predicted_s, _ = first_plan_of_a_step(seconds)
    assert 0 < plan.num_tokens < 11 and predicted_s <= seconds < whole_s


@settings(max_examples=60)
@given(
    policy=st.sampled_from(known_policies()),
    asked=st.lists(st.tuples(st.integers(0, 6), requests), max_size=6),
    steps=st.lists(st.lists(st.integers(3, 20), min_size=1, max_size=3), max_size=3),
    scores=st.lists(st.integers(2, 30), max_size=2),
    budgets=st.lists(st.none() | st.floats(0.0, 0.15), min_size=1, max_size=8),
    blocks=st.integers(16, 64),
)
def test_no_plan_is_predicted_to_exceed_its_time_and_all_work_ends(
    policy, asked, steps, scores, budgets, blocks
):
    options = {"interval_s": "1"} if policy == "ekya" else {}
    bounded = Bounded(build_policy(policy, options), budgets)
    bench = Bench(bounded, blocks)
    bench.loop.teaching.open_trainer(TrainerSpec("t", LoraSpec()))
    for place, lengths in enumerate(steps if policy != "no_retrain" else []):
        bench.loop.teaching.add_step(training(f"s{place}", lengths))
    for place, length in enumerate(scores):
        tokens = tuple(range(length))
        bench.loop.teaching.add_score(ScoreRequest(f"score{place}", tokens, 1))
    for iteration in range(3000):
        for place, (pause, each) in enumerate(asked):
            if pause == iteration:
                bench.loop.add(replace(each, request_id=f"{each.request_id}{place}"))
        count = len(bench.plans)
        bench.clock.advance(0.05)
        bench.loop.step()
        for plan, seconds in zip(bench.plans[count:], bench.predicted[count:], strict=True):
            wanted = math.inf if bounded.seconds is None else bounded.seconds
            assert seconds <= wanted + 1e-9 or is_least_piece(plan)
        if iteration > 6 and not bench.scheduler.state.all and not bench.scheduler.learning.queued:
            break
    else:
        raise AssertionError("work never ends")


class Scripted:
    """Everything in order of number, within a time."""

    traits = Traits()
    seconds: float | None = None

    def decide(self, view: View) -> Decision:
        sequences = sorted((*view.running, *view.waiting, *view.learning), key=lambda s: s.seq_id)
        return Decision.on_device(
            tuple(Candidate(seq.seq_id) for seq in sequences),
            slices=tuple(SliceCandidate(step.step_id) for step in view.steps),
            seconds=self.seconds,
        )


def bench_with(*asked: Request) -> Bench:
    bench = Bench(Scripted(), tokens=64)
    for each in asked:
        bench.loop.add(each)
    return bench


def test_decodes_are_granted_in_order_while_they_are_in_time():
    bench = bench_with(*(request(name, 4 + place) for place, name in enumerate("abcde")))
    assert len(bench.step().spans) == 5
    work = PassWork()
    work.decode_all([5, 6, 7])
    bench.policy.seconds = bench.scheduler.latency.forward_s(work)
    assert [span.seq_id for span in bench.step().spans] == [0, 1, 2]
    bench.policy.seconds = 0.0
    assert [span.seq_id for span in bench.step().spans] == [0], "the first is granted anyway"


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_is_cut_to_the_rows_that_are_in_time(logprobs, n):
    bench = bench_with(request("a", 6), request("b", 40, n=n, prompt_logprobs=logprobs))
    bench.policy.seconds = 0.06
    granted = []
    while sum(granted) < 40:
        plan = bench.step()
        span = plan.spans[-1]
        granted.append(len(span.tokens) if span.seq_id == 1 else 0)
        assert bench.predicted[-1] <= 0.06
        if span.end < 40:  # nor would one more row have been in time
            targets = (1,) * (len(span.score_targets) + bool(span.score_targets))
            more = structs.replace(span, tokens=(*span.tokens, 1), score_targets=targets)
            work = PassWork.of(replace(plan, spans=(*plan.spans[:-1], more)))
            assert bench.scheduler.latency.forward_s(work) > 0.06
    assert len(granted) > 1 and granted[0] > 0


def test_the_first_prompt_gets_a_block_of_rows_if_it_gets_no_more():
    bench = bench_with(request("a", 10), request("b", 3))
    bench.policy.seconds = 0.0
    spans = [bench.step().spans for _ in range(3)]
    assert [[len(span.tokens) for span in each] for each in spans] == [[4], [4], [2]]
    assert bench.scheduler.state.num_waiting == 1, "nobody starts that there is no time for"


def test_slices_and_updates_get_the_time_that_the_pass_leaves():
    bench = Bench(Scripted(), tokens=64)
    bench.loop.teaching.open_trainer(TrainerSpec("t", LoraSpec()))
    bench.loop.teaching.add_step(training("s", [10, 12]))
    bench.step()
    latency, learning = bench.scheduler.latency, bench.scheduler.learning
    (recording,) = learning.heads[0].recordings
    bench.loop.add(request("a", 3))
    prompt = PassWork()
    prompt.span(0, 3, draws=1)
    pass_s = latency.forward_s(prompt)
    bench.policy.seconds = pass_s + latency.slice_s(recording.backward, 2) + 1e-6
    plan = bench.step()
    assert [(piece.hi, piece.lo) for piece in plan.slices] == [(3, 1)] and len(plan.spans) == 1
    bench.policy.seconds = pass_s / 2
    assert not bench.step().slices and recording.layers_left == 1, "a decode goes first"
    bench.loop.abort("a")
    assert bench.step().slices, "without requests, a layer is the first piece"
    assert len(bench.step().updates) == 1, "and then the update is"
    assert bench.plans[-1].lane == DEVICE_LANE


def test_without_a_time_and_with_much_of_it_plans_are_the_same():
    texts = []
    for seconds in (None, 1e9):
        bench = bench_with(*(request(name, 20, n=2) for name in "abc"))
        bench.loop.teaching.open_trainer(TrainerSpec("t", LoraSpec()))
        bench.loop.teaching.add_step(training("s", [10, 12]))
        bench.policy.seconds = seconds
        for _ in range(30):
            bench.step()
        texts.append(repr(bench.plans))
    assert texts[0] == texts[1]
