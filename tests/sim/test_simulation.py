"""The simulator runs the real scheduler: all requests end, nobody starves, equal runs are equal."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_executor import Costs, FakeExecutor
from tandem.bench.simulation import TRAINER, Training, arrivals_of, outcomes_of
from tandem.bench.workload import PlannedRequest
from tandem.build import build_simulation, join_loop, known_policies
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.decision import Decision
from tandem.core.errors import PolicyFault
from tandem.core.events import ModelInfo, PredictionError
from tandem.core.plan import DrawResult, LanePlan
from tandem.core.ports import Urgent, never
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
from tandem.engine.loop import EngineLoop
from tandem.estimators.datasheet import datasheet_profile
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Ceilings, Profile
from tandem.scheduling.view import Policy, View
from tandem.sim.curves import Saturating
from tandem.sim.run import Arrival, Simulation
from tandem.sim.timeline import Timeline

NOTHING = 1e-12
VOCABULARY = 50


def small_profile(
    num_blocks: int = 64, noise: tuple[float, ...] = (), resume_s: float = 0.0
) -> Profile:
    """20 ms a pass, 1 ms a row; the same as the fake executor's costs below."""
    info = ModelInfo(
        model="small", architecture="none", device="none", dtype="none", vocab_size=VOCABULARY,
        max_model_len=64, eos_token_ids=(), block_size=4, num_blocks=num_blocks,
        num_parameters=0, weight_bytes=0, kernels="none", num_layers=3, recording_tokens=64,
    )  # fmt: skip
    forward = (0.02, 0.001, *[NOTHING] * 3, 0.001, *[NOTHING] * 5)
    slices = (0.002, NOTHING, 0.0003, 0.0002, *[NOTHING] * 3)
    rates = Rates(forward, slices, 0.01, measured=True, slices_measured=True)
    return Profile(
        info, rates, Ceilings(1e12, 1e10), "made up", noise={"pass": noise}, resume_s=resume_s
    )


COSTS = Costs(iteration_s=0.02, token_s=0.001, slice_s=0.002, layer_token_s=0.0005, update_s=0.01)


def config(policy: str, **scheduling: object):
    given_here = {"policy": policy, "max_sequences": 8, "max_batch_tokens": 32} | scheduling
    return resolve({"scheduling": given_here})


def load(
    shapes: list[tuple[float, int, int]], steps: int = 0, offline: Collection[int] = ()
) -> tuple[list[Arrival], list]:
    """`offline` has the places, in order of arrival, of requests for which nobody waits."""
    planned = [
        PlannedRequest(place, at_s, tuple((place + row) % 5 for row in range(prompt)), output)
        for place, (at_s, prompt, output) in enumerate(sorted(shapes))
    ]
    training = Training(pairs=2, micro_batch_pairs=1, pair_tokens=10, always=steps)
    arrivals, trainers = arrivals_of(planned, training, VOCABULARY, 0)
    for place in set(offline) & set(range(len(planned))):
        work = replace(arrivals[place].work, work_class=WorkClass.OFFLINE)
        arrivals[place] = replace(arrivals[place], work=work)
    return arrivals, trainers


def run_one(policy: str, arrivals, trainers, profile: Profile, **options: object):
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    plans: list[LanePlan] = []

    def on_plan(plan, result):
        plans.append(plan)
        timeline(plan, result)

    loop, _ = build_simulation(
        config(policy, **options), profile, clock, on_plan=on_plan, check_every_step=True
    )
    simulation = Simulation(loop, clock, arrivals, trainers)
    report = simulation.run(until_s=3600.0)
    return report, timeline, plans


OVERLOAD = [(0.05 * place, 12, 16) for place in range(1000)]


def in_time(report, ttft_s: float) -> int:
    return sum(outcome.ttft_s <= ttft_s for outcome in report.outcomes.values())


def test_under_overload_some_are_in_time_instead_of_nobody():
    """A fifth more than can be served, for 50 s: most of what can be is in time, the others wait
    for longer, and the server is as busy."""
    arrivals, trainers = load(OVERLOAD, steps=1)
    found = []
    for share in ("1", "0.25"):
        report, _, _ = run_one(
            "unified", arrivals, trainers, small_profile(256), policy_options={"late_share": share}
        )
        assert all(outcome.output_tokens == 16 for outcome in report.outcomes.values())
        assert sum(step.applied for step in report.steps) == 1
        found.append(report)
    first_come, by_turns = found
    assert in_time(first_come, 1.0) < 200 < 600 < in_time(by_turns, 1.0)
    assert by_turns.ended_s == pytest.approx(first_come.ended_s, rel=0.03)


def test_no_request_starves_however_many_are_in_time():
    """Of every four that start one is late, so that a late one waits for four times as many starts
    as there were late ones before it."""
    arrivals, trainers = load(OVERLOAD)
    report, _, _ = run_one("unified", arrivals, trainers, small_profile(256))
    outcomes = sorted(report.outcomes.values(), key=lambda outcome: outcome.arrival_s)
    late = [outcome for outcome in outcomes if outcome.ttft_s > 1.0]
    firsts = sorted(outcome.first_s for outcome in outcomes)
    begun = firsts.index(late[0].first_s)
    for place, outcome in enumerate(late):
        assert firsts.index(outcome.first_s) <= begun + 4 * (place + 1) + 8
    assert [outcome.first_s for outcome in late] == sorted(outcome.first_s for outcome in late)


class Sometimes:
    """Runs what the policy of the settings would, but nothing between two times."""

    decodes_alike = False
    records_in_parts = False

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


@settings(max_examples=20, deadline=None)
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


SHAPES = st.lists(
    st.tuples(st.floats(0.0, 5.0), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=25
)
OFFLINE = st.sets(st.integers(0, 24))  # places in SHAPES
# With these, what has waited goes first in runs of a few seconds too.
IMPATIENT = {
    "unified": {"patience_s": "0.2", "offline_patience_s": "0.1", "overdue_share": "0.5"},
    "mace": {"delta_ft": "9"},
    "ekya": {"interval_s": "1"},
}


@settings(max_examples=25, deadline=None)
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
        assert len(used) <= blocks
    if policy != "no_retrain":  # which is what it is for
        assert sum(step.applied for step in report.steps) == steps


@settings(max_examples=10, deadline=None)
@given(shapes=SHAPES, steps=st.integers(0, 3), offline=OFFLINE, seed=st.integers(0, 9))
@pytest.mark.parametrize("policy", known_policies())
def test_the_same_run_twice_makes_the_same_plans(policy, shapes, steps, offline, seed):
    profile = small_profile(noise=(-0.2, -0.05, 0.1, 0.3))
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


CROWD = [(0.02 * place + 0.00025, 3 + place % 9, 6 + place % 7) for place in range(80)]


@dataclass(frozen=True)
class Made:
    """The digest of a run's plans and when it had ended; what the memory estimator knows then."""

    plans: tuple[int, float]
    demand: tuple[float, PredictionError]


def made(
    policy: str,
    *,
    simulated: bool,
    options: dict[str, str] | None = None,
    shapes: list[tuple[float, int, int]] = CROWD,
    offline: range = range(0, 80, 4),
) -> Made:
    """By default a load of all classes that is more than can be served at once.

    Nobody comes when an iteration ends, to the last bit. The fake executor's answers are replaced
    by the simulator's: what two of them share is shared in the cache.
    """
    arrivals, trainers = load(shapes, steps=3, offline=offline)
    clock = VirtualClock()
    timeline = Timeline(clock.now)
    profile = small_profile()
    settings = config(policy, policy_options=options or {})
    loop, simulator = build_simulation(settings, profile, clock, on_plan=timeline)
    if not simulated:
        executor = FakeExecutor(64, recording_tokens=64, clock=clock, costs=COSTS)
        submit, poll = executor.submit, executor.poll
        plans: list[LanePlan] = []

        def submit_and_keep(plan: LanePlan, urgent: Urgent = never) -> int:
            plans.append(plan)
            return submit(plan, urgent)

        def poll_and_show():
            results = []
            for plan, result in zip(plans, poll(), strict=True):
                timeline(plan, result)
                draws = [
                    DrawResult(draw.seq_id, simulator.token_of(draw.seq_id, draw.position))
                    for span in plan.spans
                    for draw in span.draws
                ]
                results.append(replace(result, draws=tuple(draws)))
            plans.clear()
            return results

        executor.submit, executor.poll = submit_and_keep, poll_and_show
        loop = join_loop(settings, executor, clock=clock, rates=profile.rates)
    Simulation(loop, clock, arrivals, trainers).run(until_s=600.0)
    held = loop.stats().prediction_errors["online_blocks"]
    plans = (timeline.digest, round(clock.now(), 6))
    return Made(plans, (loop.scheduler.demand.demand, held))


@pytest.mark.parametrize("policy", known_policies())
def test_engine_and_simulator_decide_alike_given_the_same_times(policy):
    """The fake executor knows the rules of a plan, the simulator's only its time."""
    for options in ({}, IMPATIENT.get(policy, {})):
        engine = made(policy, simulated=False, options=options)
        assert made(policy, simulated=True, options=options).plans == engine.plans


@pytest.mark.parametrize("policy", known_policies())
def test_engine_and_simulator_see_the_same_demand(policy):
    shapes = [(0.13 * place, 3 + place % 9, 2 + place % 7) for place in range(30)]
    runs = [
        made(policy, simulated=simulated, shapes=shapes, offline=range(0))
        for simulated in (True, False)
    ]
    assert runs[0] == runs[1]
    assert runs[0].demand[1].samples > 2


@pytest.mark.parametrize(
    ("policy", "option"),
    [(policy, option) for policy, options in IMPATIENT.items() for option in options],
)
def test_that_load_is_one_in_which_patience_ends(policy, option):
    """So that the engine and the simulator are compared in what comes then, too."""
    patient = {name: value for name, value in IMPATIENT[policy].items() if name != option}
    impatient = made(policy, simulated=True, options=IMPATIENT[policy])
    assert made(policy, simulated=True, options=patient).plans != impatient.plans


@pytest.mark.parametrize("policy", ["unified", "mace", "static"])
def test_training_does_not_starve_while_requests_keep_coming(policy):
    """At full load for a minute, some step is made; and no request waits for ever."""
    arrivals, trainers = load([(0.05 * place, 12, 8) for place in range(1200)], steps=3)
    report, _, _ = run_one(policy, arrivals, trainers, small_profile(256), ttft_slo=0.5)
    made = [step for step in report.steps if step.applied]
    assert len(made) == 3 and min(step.finished_s for step in made) < 60.0
    waits = [outcome.ttft_s for outcome in report.outcomes.values()]
    assert len(waits) == 1200 and not any(math.isnan(wait) for wait in waits)


@pytest.mark.parametrize("options", [{}, {"tau_tasks": "2"}, {"bins": "false"}])
def test_old_work_that_does_not_fit_stops_nobody(options):
    """Work that outranks all that runs, and for which there is no memory."""
    shapes = [(0.02 * place, 30, 25) for place in range(200)]
    arrivals, trainers = load(shapes, steps=6)
    given_here = {"policy_options": options | {"delta_ft": "9", "delta_prefill": "5"}}
    report, _, _ = run_one("mace", arrivals, trainers, small_profile(24), **given_here)
    assert all(outcome.output_tokens == 25 for outcome in report.outcomes.values())
    assert sum(step.applied for step in report.steps) == 6


@settings(max_examples=25, deadline=None)
@given(shapes=SHAPES, steps=st.integers(0, 2), offline=OFFLINE, blocks=st.integers(20, 80))
@pytest.mark.parametrize("policy", ["adainf", "fcfs", "no_retrain", "unified"])
def test_leaps_give_what_single_iterations_give(policy, shapes, steps, offline, blocks):
    """Times to the last bit, with noise, the estimators' own state, and what is left cached."""
    profile = small_profile(blocks, noise=(-0.2, -0.05, 0.1, 0.3), resume_s=0.005)
    found = []
    for leaping in (False, True):
        arrivals, trainers = load(shapes, steps, offline)
        clock = VirtualClock()
        loop, executor = build_simulation(
            config(policy, policy_options=IMPATIENT.get(policy, {})),
            profile,
            clock,
            seed=1,
            check_every_step=True,
        )
        leaps = executor if leaping else None
        report = Simulation(loop, clock, arrivals, trainers, leaps=leaps).run(until_s=60.0)
        loop.scheduler.cache.check()
        seen = [
            (o.first_s, o.last_s, o.output_tokens, o.cached_tokens)
            for o in report.outcomes.values()
        ]
        demand = (loop.scheduler.demand.demand, loop.scheduler.demand.errors.report())
        state = (clock.now(), loop.scheduler.latency.rates, loop.scheduler.cache.counters, demand)
        found.append((seen, report.iterations, *state, cached_depths(loop)))
    assert found[0] == found[1]


def cached_depths(loop: EngineLoop) -> list[tuple[int, int]]:
    """Depth and age rank of every cached block: what an eviction in another order would change."""
    return sorted((b.depth, b.last_access) for b in loop.scheduler.cache.idle_blocks())


def leaped(shapes, num_blocks: int = 64):
    """A run with leaps: its report, the plans that were executed one by one, and the loop."""
    planned = [
        PlannedRequest(n, at_s, tuple(range(n, n + prompt)), output)
        for n, (at_s, prompt, output) in enumerate(shapes)
    ]
    arrivals, _ = arrivals_of(planned, Training(), VOCABULARY, 0)
    clock = VirtualClock()
    loop, executor = build_simulation(config("unified"), small_profile(num_blocks), clock)
    submitted = []
    submit = executor.submit
    executor.submit = lambda plan, urgent: (submitted.append(plan), submit(plan, urgent))[1]
    return Simulation(loop, clock, arrivals, leaps=executor).run(), submitted, loop


def test_a_leap_is_taken_at_all():
    report, submitted, _ = leaped([(0.0, 10, 12), (0.0, 10, 9)])
    assert report.iterations == 12 and len(submitted) < 6


def test_a_leap_of_seconds_samples_what_is_held_each_second():
    """50 tokens of 21 ms, 4 a block: of the prompt, and when the 48th token is computed."""
    _, submitted, loop = leaped([(0.0, 10, 50)])
    assert len(submitted) < 6
    first, second = -(-10 // 4), -(-(10 + 48) // 4)
    mean, deviation = (first + second) / 2, (second - first) / 2
    assert loop.scheduler.demand.demand == pytest.approx(mean + 2 * deviation)
    assert loop.scheduler.demand.errors.report().bias == (first - second) / second


def test_a_full_cache_does_not_stop_leaps():
    shapes = [(3.0 * (place // 2), 10, 30) for place in range(8)]
    report, submitted, loop = leaped(shapes, num_blocks=24)
    assert loop.scheduler.cache.counters.evictions_blocks > 20
    assert report.iterations > 4 * 29 and len(submitted) < report.iterations / 4


def test_a_first_token_is_no_part_of_a_leap():
    """The last token of a prompt that the iteration before had no row for."""
    shapes = [(0.0, 3, 1), (0.0, 30, 3)]
    report, _, _ = leaped(shapes)
    outcome = report.outcomes["request-1"]
    assert outcome.tpot_s == pytest.approx(0.021, abs=1e-6)


def test_what_can_never_run_is_refused_alone():
    report, _, _ = leaped([(0.0, 10, 5), (0.1, 64, 5), (0.2, 10, 5)])
    assert [each.error for each in report.outcomes.values()] == [None, "refused", None]
    assert [each.error for each in outcomes_of(report)] == [None, "refused", None]


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
