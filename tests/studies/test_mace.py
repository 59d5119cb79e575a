"""The MACE comparison: equal loads, figures that add up, and a page that shows all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.mace.engines import make_engine, make_loop
from benchmarks.mace.runs import (
    FIFO_SEQUENCES,
    FIFO_VARIANTS,
    SCALES,
    VARIANTS,
    Engine,
    Load,
    load_of,
    objective,
    run_variant,
)
from tandem.core.clock import VirtualClock
from tandem.core.request import Request
from tandem.core.training import TrainerSpec
from tandem.estimators.datasheet import load_profile
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import PassWork
from tandem.sim.timeline import Timeline

SMALL = replace(SCALES[0], rate=4.0, duration_s=5.0, pair_tokens=64)
PROFILE = load_profile(SMALL.profile)
BUSY = replace(SMALL, rate=40.0, duration_s=4.0)


def test_the_load_is_the_same_for_everybody_and_only_jobs_depend_on_the_rate():
    first, none = load_of(SMALL, PROFILE, 0.0, 1)
    second, some = load_of(SMALL, PROFILE, 0.5, 1)
    requests = [arrival for arrival in second if isinstance(arrival.work, Request)]
    assert requests == first and none == 0
    assert 0 < some == len(second) - len(first) < len(first)


def test_prompts_share_their_beginnings():
    arrivals, _ = load_of(SMALL, PROFILE, 0.0, 1)
    beginnings = {arrival.work.prompt[: SMALL.shared_tokens] for arrival in arrivals}
    assert 1 < len(beginnings) <= SMALL.templates


def test_prompts_and_answers_fit_into_a_short_context():
    """Two thirds of it and one; where there is more, the context does not count."""
    info = replace(PROFILE.info, max_model_len=120)
    short, _ = load_of(SMALL, replace(PROFILE, info=info), 0.0, 1)
    usual, _ = load_of(SMALL, PROFILE, 0.0, 1)
    sizes = [(len(each.work.prompt), each.work.sampling.max_tokens) for each in usual]
    cut = [(min(prompt, 80), min(output, 40)) for prompt, output in sizes]
    assert cut != sizes
    assert [(len(each.work.prompt), each.work.sampling.max_tokens) for each in short] == cut


def test_requests_bring_the_objectives_by_which_they_are_judged():
    """Of the paper (6.3): five times the forward of their own prompt."""
    arrivals, _ = load_of(SMALL, PROFILE, 0.0, 1)
    latency = LatencyModel(PROFILE.rates)
    for each in arrivals:
        alone = PassWork()
        alone.span(0, len(each.work.prompt), draws=1)
        assert each.work.slo.ttft_s == pytest.approx(5.0 * latency.forward_s(alone))
    decode = PassWork()
    decode.decode(SMALL.prompt_tokens + SMALL.output_tokens // 2)
    (tpot_s,) = {each.work.slo.tpot_s for each in arrivals}
    assert tpot_s == pytest.approx(5.0 * latency.forward_s(decode))
    patient = objective(SMALL, latency, 100, 10.0)
    assert patient.ttft_s == 2.0 * objective(SMALL, latency, 100).ttft_s
    assert patient.tpot_s == objective(SMALL, latency, 100).tpot_s


def test_attainment_is_by_what_each_request_asked_for():
    load = Load(BUSY, PROFILE, 0.5)
    adainf = VARIANTS[1]
    engine = make_engine(adainf, PROFILE)
    report, _ = load.meet(engine)
    slos = {
        each.work.request_id: each.work.slo
        for each in load_of(BUSY, PROFILE, 0.5, 0)[0]
        if isinstance(each.work, Request)
    }
    late = [each for name, each in report.outcomes.items() if each.ttft_s > slos[name].ttft_s]
    row = run_variant(adainf, load, make_engine)
    assert 0.0 < row.attainment < 1.0
    assert row.attainment == pytest.approx(1.0 - len(late) / len(slos))


def test_an_answer_that_is_cut_off_is_unfinished():
    """Requests come for a second and may take two more; the longest answers need longer."""
    load = Load(replace(SMALL, rate=30.0, duration_s=1.0, output_tokens=100), PROFILE, 0.0)
    row = run_variant(VARIANTS[-1], load, make_engine)
    assert 0 < row.unfinished < len(load_of(load.scale, PROFILE, 0.0, 0)[0])
    assert row.attainment == 1.0  # all have begun


def test_a_device_is_left_without_trainers_also_when_time_is_up():
    """Others follow on it; jobs of `ekya` have not begun when this short load ends."""
    load = Load(replace(SMALL, duration_s=1.0), PROFILE, 1.0)
    engine = make_engine(VARIANTS[0], PROFILE)
    report, jobs = load.meet(engine)
    assert len(report.steps) < jobs
    assert not engine.loop.scheduler.learning.queued
    engine.loop.teaching.open_trainer(TrainerSpec("adapter-0"))


def test_utilisation_counts_what_every_row_is_multiplied_with():
    load = Load(SMALL, PROFILE, 0.5)
    of_all = run_variant(VARIANTS[0], load, make_engine)
    half = replace(PROFILE.info, layer_parameters=PROFILE.info.num_parameters // 2)
    of_half = run_variant(
        VARIANTS[0], replace(load, profile=replace(PROFILE, info=half)), make_engine
    )
    assert of_half == replace(of_all, utilisation=pytest.approx(of_all.utilisation / 2))


class RunsOn(VirtualClock):
    """Like a real one: it began long ago, and never stands still."""

    def __init__(self) -> None:
        super().__init__(1000.0)

    def advance(self, seconds: float) -> None:
        super().advance(max(seconds, 1e-6))


def test_a_clock_that_began_long_ago_changes_no_figure():
    def real(variant, profile):
        clock = RunsOn()
        timeline = Timeline(clock.now)
        return Engine(make_loop(variant, profile, clock, timeline), clock, timeline)

    load = Load(SMALL, PROFILE, 0.2)
    expected, found = (run_variant(VARIANTS[1], load, make) for make in (make_engine, real))
    for name in ("utilisation", "ttft_s", "last_s", "fine_tune_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=0.01)


@pytest.mark.parametrize("variant", [*VARIANTS, FIFO_VARIANTS[-1]], ids=lambda each: each.name)
def test_every_variant_serves_and_trains(variant):
    load = Load(SMALL, PROFILE, 0.5)
    row = run_variant(variant, load, make_engine)
    assert row.unfinished == 0 and row.jobs_done == row.jobs > 0
    assert 0 < row.attainment <= 1 and 0 < row.utilisation < 1
    assert 0 < row.ttft_s <= row.ttft_p95_s and row.tbt_s > 0 and row.fine_tune_s > 0
    requests = [each.at_s for each in load_of(SMALL, PROFILE, 0.5, 0)[0]]
    assert max(requests) < row.last_s
    assert run_variant(variant, load, make_engine) == row


@pytest.mark.parametrize("variant", FIFO_VARIANTS, ids=lambda each: each.name)
def test_in_order_of_arrival_everybody_has_the_same_limits(variant):
    engine = make_engine(variant, PROFILE)
    Load(BUSY, PROFILE, 0.3).meet(engine)
    sequences = [moment.decodes for moment in engine.timeline.moments]
    assert 45 <= max(sequences) <= FIFO_SEQUENCES


def test_only_the_hybrid_of_figure_13_trains_beside_answers():
    """All else equal, it needs fewer iterations for the same work."""
    mixed, found = {}, {}
    for variant in FIFO_VARIANTS:
        if variant.policy == "mace":
            engine = make_engine(variant, PROFILE)
            Load(BUSY, PROFILE, 0.3).meet(engine)
            moments = engine.timeline.moments
            mixed[variant.name] = sum(1 for each in moments if each.decodes and each.training)
            found[variant.name] = len(moments)
    assert mixed["mace/bin"] == 0 < mixed["mace/fifo"]
    assert found["mace/fifo"] < found["mace/bin"]
