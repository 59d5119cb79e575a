"""The simulator runs the real scheduler: all requests end, nobody starves, equal runs are equal."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_load import IMPATIENT, OFFLINE, SHAPES, VOCABULARY, config, load, run_one, small_profile

from tandem.bench.simulation import TRAINER, Training, arrivals_of, outcomes_of
from tandem.bench.workload import PlannedRequest
from tandem.build import build_simulation
from tandem.core.clock import VirtualClock
from tandem.core.decision import Decision
from tandem.core.errors import PolicyFault
from tandem.core.plan import DEVICE_LANE, Draw, LanePlan, Span, Update
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import WorkClass
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.estimators.datasheet import datasheet_profile
from tandem.estimators.terms import coldness
from tandem.scheduling.registry import known_policies
from tandem.scheduling.view import Policy, Traits, View
from tandem.sim.curves import Saturating
from tandem.sim.executor import SimExecutor
from tandem.sim.run import Arrival, Simulation
from tandem.sim.timeline import Timeline


def test_nobody_waits_for_trainers_to_be_opened():
    """A real device takes its time for it; the load begins when it is done."""
    arrivals, trainers = load([(0.0, 8, 2)], steps=1)
    clock = VirtualClock()
    loop, executor = build_simulation(config("fcfs"), small_profile(), clock)
    opened = executor.open_trainer

    def open_slowly(spec):
        clock.advance(5.0)
        return opened(spec)

    executor.open_trainer = open_slowly
    report = Simulation(loop, clock, arrivals, trainers).run(until_s=60.0)
    assert report.began_s == 5.0 and report.ended_s < 1.0
    assert report.outcomes["request-0"].ttft_s < 1.0


def test_an_iteration_takes_the_loop_its_time_once():
    """Whatever its lanes are; nothing predicts it."""
    profile, clock = small_profile(host_s=0.005), VirtualClock()
    executor = SimExecutor(profile, clock, curve=Saturating(), noise=False)
    for step, lane, ends_s in ((0, "a", 0.026), (0, "b", 0.047), (1, "a", 0.073)):
        plan = LanePlan(step, lane, (Span(0, 3, (1,), ((0,),)),))
        executor.submit(plan)
        assert clock.now() == pytest.approx(ends_s)
    assert [result.elapsed_s for result in executor.poll()] == pytest.approx([0.021] * 3)


class Sometimes:
    """Runs what the policy of the settings would, but nothing between two times."""

    traits = Traits()

    def __init__(self, policy: Policy, from_s: float, until_s: float) -> None:
        self._policy, self._from_s, self._until_s = policy, from_s, until_s

    def decide(self, view: View) -> Decision:
        if self._from_s <= view.now < self._until_s:
            return Decision()
        return self._policy.decide(view)


def run_sometimes(from_s: float, until_s: float, ends_s: float = math.inf):
    arrivals, _ = load([(0.0, 5, 5), (20.0, 5, 5)])
    clock = VirtualClock()
    loop, _ = build_simulation(config("fcfs"), small_profile(), clock)
    loop.scheduler._policy = Sometimes(loop.scheduler._policy, from_s, until_s)
    return Simulation(loop, clock, arrivals).run(until_s=ends_s)


def test_a_policy_that_runs_nothing_any_more_is_named():
    """Time goes on and it is asked again, but not for ever."""
    with pytest.raises(
        PolicyFault, match=r"policy has run nothing for 10.* 0 requests wait and 1 "
    ):
        run_sometimes(0.05, math.inf)
    report = run_sometimes(0.05, math.inf, ends_s=8.0)
    assert report.ended_s == pytest.approx(8.0)
    report = run_sometimes(0.05, 5.0)
    assert [outcome.output_tokens for outcome in report.outcomes.values()] == [5, 5]
    assert 5.0 <= report.outcomes["request-0"].last_s < 5.5


@settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(20, 50), min_size=1, max_size=3),
    shapes=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.integers(20, 40), st.integers(1, 12)),
        min_size=1, max_size=6,
    ),
    rows=st.integers(4, 40),
    patience_s=st.sampled_from(["0.01", "0.3"]),
    ttft_s=st.sampled_from([0.02, 0.3, 1.0]),
)  # fmt: skip
@pytest.mark.parametrize("policy", ["unified", "static", "mace"])
def test_a_small_cache_and_old_learning_stop_nobody(
    policy, lengths, shapes, rows, patience_s, ttft_s
):
    """Each sequence nearly fills the cache, and learning is long overdue."""
    arrivals, trainers = load(shapes)
    trainers = [TrainerSpec("t", LoraSpec())]
    for place, length in enumerate(lengths):
        target = TrainingSequence(tuple(range(length)), 2, Role.TARGET)
        step = TrainingStep(f"s{place}", "t", LossSpec(LossKind.SFT), ((target,),))
        arrivals.append(Arrival(0.0, step))
    options = {"patience_s": patience_s} if policy == "unified" else {}
    report, _, _ = run_one(
        policy, arrivals, trainers, small_profile(14), max_batch_tokens=rows, ttft_slo=ttft_s,
        policy_options=options,
    )  # fmt: skip
    assert all(outcome.error is None for outcome in report.outcomes.values())
    assert sum(outcome.output_tokens for outcome in report.outcomes.values()) == sum(
        output for _, _, output in shapes
    )
    assert len(report.steps) == len(lengths)
    assert report.ended_s < 60.0


@settings(max_examples=25)
@given(
    shapes=SHAPES,
    steps=st.integers(0, 4),
    offline=OFFLINE,
    blocks=st.integers(20, 80),
    impatient=st.booleans(),
)
@pytest.mark.parametrize("policy", known_policies())
def test_every_request_ends_within_its_budgets(policy, shapes, steps, offline, blocks, impatient):
    arrivals, trainers = load(shapes, steps, offline)
    options = IMPATIENT.get(policy, {}) if impatient else {}
    report, _, plans = run_one(
        policy, arrivals, trainers, small_profile(blocks), policy_options=options
    )
    assert len(report.outcomes) == len(shapes)
    for place, (_, prompt, output) in enumerate(sorted(shapes)):
        outcome = report.outcomes[f"request-{place}"]
        assert outcome.error is None and outcome.output_tokens == output
        assert outcome.prompt_tokens == prompt
        assert outcome.arrival_s < outcome.first_s <= outcome.last_s
    for plan in plans:
        assert plan.num_tokens <= 32 and len(plan.spans) <= 8
        used = {block for span in plan.spans for block in span.block_tables[0]}
        assert used <= set(range(blocks))
        assert all(len(span.block_tables[0]) * 4 >= span.end for span in plan.spans)
    if policy != "no_retrain":  # which is what it is for
        assert sum(step.applied for step in report.steps) == steps


@settings(max_examples=10)
@given(shapes=SHAPES, steps=st.integers(0, 3), offline=OFFLINE, seed=st.integers(0, 9))
@pytest.mark.parametrize("policy", known_policies())
def test_the_same_run_twice_makes_the_same_plans(policy, shapes, steps, offline, seed):
    profile = small_profile(noise=(-0.2, -0.05, 0.1, 0.3), cold_s=0.006)
    settings = config(policy, policy_options=IMPATIENT.get(policy, {}))
    digests = []
    for _ in range(2):
        arrivals, trainers = load(shapes, steps, offline)
        clock = VirtualClock()
        timeline = Timeline(clock.now)
        loop, _ = build_simulation(settings, profile, clock, seed=seed, on_plan=timeline)
        Simulation(loop, clock, arrivals, trainers).run(until_s=3600.0)
        digests.append((timeline.digest, clock.now()))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("options", [{}, {"tau_tasks": "2"}, {"bins": "false"}])
def test_old_work_that_does_not_fit_stops_nobody(options):
    """Work that outranks all that runs, and for which there is no memory."""
    shapes = [(0.02 * place, 30, 25) for place in range(200)]
    arrivals, trainers = load(shapes, steps=6)
    given_here = {"policy_options": options | {"delta_ft": "9", "delta_prefill": "5"}}
    report, _, _ = run_one("mace", arrivals, trainers, small_profile(24), **given_here)
    assert all(outcome.output_tokens == 25 for outcome in report.outcomes.values())
    assert sum(step.applied for step in report.steps) == 6


def test_as_many_long_offline_requests_are_in_the_engine_as_a_server_keeps(monkeypatch):
    monkeypatch.setattr("tandem.sim.run.POOL_TOKENS", 100)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    stream = (
        Request(str(n), (n % 50,) * 30, params, work_class=WorkClass.OFFLINE) for n in range(20)
    )
    clock = VirtualClock()
    loop, _ = build_simulation(config("unified"), small_profile(), clock)
    run, most = Simulation(loop, clock, [], offline=stream), 0
    for tenth in range(100):
        run.run(until_s=tenth / 10)
        most = max(most, len(loop.scheduler.state.all))
    assert most == 4
    assert sum(each.finished for each in run.report.outcomes.values()) == 20


def test_what_can_never_run_is_refused_alone():
    arrivals, _ = load([(0.0, 10, 5), (0.1, 64, 5), (0.2, 10, 5)])
    report, _, _ = run_one("unified", arrivals, [], small_profile())
    assert [each.error for each in report.outcomes.values()] == [None, "refused", None]
    assert [each.error for each in outcomes_of(report)] == [None, "refused", None]


def test_an_answer_that_is_cut_off_did_not_end():
    arrivals, _ = load([(0.0, 4, 3), (0.0, 4, 40)])
    clock = VirtualClock()
    loop, _ = build_simulation(config("fcfs"), small_profile(), clock)
    report = Simulation(loop, clock, arrivals).run(until_s=0.3)
    assert all(each.output_tokens > 1 for each in report.outcomes.values())
    assert [each.error for each in outcomes_of(report)] == [None, "unfinished"]


def test_time_passes_as_the_profile_says():
    arrivals, _ = load([(1.0, 10, 3)])
    report, timeline, _ = run_one("fcfs", arrivals, [], small_profile())
    outcome = report.outcomes["request-0"]
    assert outcome.first_s == pytest.approx(1.0 + 0.02 + 0.010, abs=1e-6)
    assert outcome.last_s == pytest.approx(outcome.first_s + 2 * 0.021, abs=1e-6)
    assert [moment.prefill for moment in timeline.moments] == [10, 0, 0]
    assert [moment.decodes for moment in timeline.moments] == [0, 1, 1]


def test_a_pass_after_a_sleep_takes_longer():
    arrivals, _ = load([(1.0, 10, 3), (5.0, 10, 1)])
    report, _, _ = run_one("fcfs", arrivals, [], small_profile(resume_s=0.007))
    first, second = report.outcomes.values()
    for outcome in (first, second):
        assert outcome.ttft_s == pytest.approx(0.037, abs=1e-6)
    assert first.last_s - first.first_s == pytest.approx(2 * 0.021, abs=1e-6)


def test_passes_after_others_take_less_until_the_engine_sleeps():
    """Half of 8 ms less after one, three quarters after two; the first waits for the caches."""
    arrivals, _ = load([(1.0, 10, 3), (5.0, 10, 2)])
    profile = small_profile(resume_s=0.007, decode_s=0.008)
    report, _, _ = run_one("fcfs", arrivals, [], profile)
    first, second = report.outcomes.values()
    for outcome in (first, second):
        assert outcome.ttft_s == pytest.approx(0.037, abs=1e-6)
    assert first.last_s - first.first_s == pytest.approx(2 * 0.021 - 0.004 - 0.006, abs=1e-6)
    assert second.last_s - second.first_s == pytest.approx(0.021 - 0.004, abs=1e-6)


def took_s(profile, lengths: list[int], updated: int | None = None) -> list[float]:
    """Seconds of passes of one span each, with an update after one of them."""
    executor = SimExecutor(profile, VirtualClock(), curve=Saturating())
    executor.open_trainer(TrainerSpec(TRAINER))
    found = []
    for number, rows in enumerate(lengths):
        draw = Draw(0, 0, 0, SamplingParams())
        span = Span(0, 9, (1,) * rows, ((0,),), draws=(draw,))
        update = (Update(TRAINER, 0),) if number == updated else ()
        executor.submit(LanePlan(number, DEVICE_LANE, (span,), updates=update))
        found.append(executor.poll()[0].forward_s)
    return found


def test_learning_leaves_cold_caches_and_prompts_save_less_in_warm_ones():
    cold = took_s(small_profile(), [1, 1, 1, 1, 1, 4])
    warm = took_s(small_profile(decode_s=0.008, prompt_s=0.002), [1, 1, 1, 1, 1, 4], updated=2)
    saved = [a - b for a, b in zip(cold, warm, strict=True)]
    assert saved == pytest.approx([0.0, 0.004, 0.006, 0.0, 0.004, 0.0015], abs=1e-9)


def test_a_pass_finds_the_caches_as_the_one_before_left_them():
    lengths = [1, 19, 1, 1]
    passes = took_s(small_profile(cold_s=0.006), lengths)
    for rows, seconds, before_s in zip(lengths, passes, [math.inf, *passes], strict=False):
        assert seconds == pytest.approx(0.02 + 0.001 * rows + 0.006 * coldness(before_s), abs=1e-9)


def test_a_pass_after_a_sleep_finds_cold_caches_whatever_came_before():
    """The pass before it took a fraction of what empties them."""
    arrivals, _ = load([(1.0, 10, 3), (5.0, 10, 1)])
    profile = small_profile(resume_s=0.007, cold_s=0.006)
    report, _, _ = run_one("fcfs", arrivals, [], profile)
    first, second = report.outcomes.values()
    assert second.ttft_s == pytest.approx(0.02 + 0.010 + 0.006 + 0.007, abs=1e-6)
    assert first.ttft_s == pytest.approx(second.ttft_s, abs=1e-6)


def test_warm_caches_save_half_at_most():
    passes = took_s(small_profile(decode_s=0.015), [1] * 9)
    assert passes[-1] == pytest.approx(0.5 * passes[0])


def test_the_loss_falls_along_the_curve():
    arrivals, trainers = load([(0.0, 4, 2)], steps=4)
    report, _, _ = run_one("unified", arrivals, trainers, small_profile())
    losses = [step.loss for step in report.steps]
    assert losses[0] == pytest.approx(math.log(2.0))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert trainers[0].name == TRAINER
    assert report.steps[1].loss == pytest.approx(
        math.log1p(math.exp(-Saturating().margin(1))), rel=1e-6
    )


def test_shared_beginnings_are_found_in_the_cache():
    shapes = [(2.0 * place, 20, 2) for place in range(4)]
    planned = [PlannedRequest(n, at_s, (1,) * 20, 2) for n, (at_s, _, _) in enumerate(shapes)]
    arrivals, _ = arrivals_of(planned, Training(), VOCABULARY, 0)
    report, _, _ = run_one("unified", arrivals, [], small_profile())
    cached = [outcome.cached_tokens for outcome in report.outcomes.values()]
    assert cached == [0, 16, 16, 16]


def test_a_data_sheet_serves_a_load():
    arrivals, _ = load([(0.5 * place, 30, 10) for place in range(20)])
    report, _, _ = run_one("unified", arrivals, [], datasheet_profile("a100-40g", "llama-3-8b"))
    assert all(outcome.output_tokens == 10 for outcome in report.outcomes.values())
    assert 0.005 < report.outcomes["request-0"].tpot_s < 0.05


@given(
    rate=st.sampled_from([0.0, 0.05, 0.3, 0.5, 1.0, 1.4, 2.5, 7.9]),
    requests=st.integers(1, 80),
    pairs=st.integers(1, 8),
    always=st.integers(0, 2),
)
def test_pairs_arrive_at_their_rate_whatever_it_is(rate, requests, pairs, always):
    planned = [PlannedRequest(place, 1.0 + place, (1, 2), 1) for place in range(requests)]
    training = Training(rate, pairs, pair_tokens=4, always=always)
    arrivals, _ = arrivals_of(planned, training, VOCABULARY, 0)
    steps = [each.at_s for each in arrivals if isinstance(each.work, TrainingStep)]
    assert steps[:always] == [0.0] * always
    for come in range(1, requests + 1):
        made = sum(0.0 < at_s <= come for at_s in steps)
        assert made * pairs <= rate * come + 1e-6
        assert (made + 1) * pairs > rate * come - 1.0 + 1e-6
