"""Micro-benchmarks cover every kind of work, keep to limits, and find a device's rates again."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace

import pytest

from fake_executor import FakeExecutor
from rates import slice_rates
from tandem.config import SchedulingConfig
from tandem.core.clock import VirtualClock
from tandem.core.plan import LanePlan
from tandem.core.ports import Executor
from tandem.estimators.calibrate import KINDS, Samples, fit
from tandem.estimators.datasheet import datasheet_profile
from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.terms import FORWARD_TERMS
from tandem.estimators.work import BackwardWork, PassWork
from tandem.executor import profile
from tandem.executor.profile import ProbeLimits, Prober, rough_rates
from tandem.sim.curves import Saturating
from tandem.sim.executor import SimExecutor

LIMITS = ProbeLimits(max_batch_tokens=512, max_sequences=32)
_PASSES_PER_S = 4000


def device_rates(cold_s: float = 1e-9) -> Rates:
    """On it, a layer whose forward was kept whole is about half as dear as one without, and cold
    caches cost `cold_s`."""
    rates = datasheet_profile("l4", "qwen2.5-0.5b").rates
    slice_s, layer_s, row_s = rates.slices[:3]
    slices = slice_rates(
        slice=slice_s, layer=layer_s, layer_row=row_s / 2, layer_pairs=100.0 * row_s,
        layer_sequence=layer_s / 4, again=layer_s / 4, again_row=row_s / 2,
        again_pairs=50.0 * row_s, rest_row=row_s / 6, first=1e-3, first_row=1e-6,
    )  # fmt: skip
    forward = dict(zip(FORWARD_TERMS, rates.forward, strict=True)) | {"cold": cold_s}
    return replace(rates, forward=tuple(forward.values()), slices=slices)


def device(plans: list[LanePlan], cold_s: float = 1e-9, **changes: int) -> SimExecutor:
    """A device that is only computed; `changes` of what its profile says of the model."""
    profile = datasheet_profile("l4", "qwen2.5-0.5b")
    info = replace(profile.info, **changes)
    kept = {"kept_alone": (1.0, 0.0), "kept_beside": (0.0, 1.0)}
    profile = replace(profile, info=info, rates=device_rates(cold_s), **kept)
    on_plan = lambda plan, result: plans.append(plan)  # noqa: E731
    return SimExecutor(profile, VirtualClock(), curve=Saturating(), on_plan=on_plan)


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many passes in a second however slow or busy the machine is."""
    ticks = count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / _PASSES_PER_S)
    monkeypatch.setattr(profile, "time", clock)


def probe(executor: Executor, limits: ProbeLimits, seconds: float) -> Samples:
    prober = Prober(executor, limits)
    prober.run(seconds)
    return prober.samples


def test_the_rates_of_a_device_are_found_again():
    plans: list[LanePlan] = []
    executor = device(plans)
    samples = probe(executor, LIMITS, seconds=1.5)
    found = fit(samples, Rates.guess(weight_bytes=10**9, num_parameters=10**9, num_layers=24))
    assert set(found.errors) == {*KINDS, "slice"}
    assert found.kept_alone == (1.0, 0.0) and found.kept_beside == (0.0, 1.0)
    assert all(error.mape < 0.03 for error in found.errors.values())
    truth = LatencyModel(device_rates())
    model = LatencyModel(found.rates)
    for recorded in (BackwardWork.of((300,), 0.0, 1.0), BackwardWork.of((300,), 0.0, 0.0)):
        wanted = truth.slice_s(recorded, 12)
        assert model.slice_s(recorded, 12) == pytest.approx(wanted, rel=0.03)
    assert model.update_s() == pytest.approx(truth.update_s(), rel=0.01)


@pytest.mark.full
def test_what_the_pass_before_costs_is_found():
    samples = probe(device([], cold_s=0.004), LIMITS, seconds=1.0)
    befores = [each.before_s for each in samples.passes]
    assert len(set(befores)) > 50 and max(befores) < 1.0
    found = fit(samples, Rates.guess(weight_bytes=10**9, num_parameters=10**9, num_layers=24))
    assert found.errors["pass"].mape < 0.03
    model, truth = LatencyModel(found.rates), LatencyModel(device_rates(0.004))
    work = PassWork(decodes=1, context=100, longest=100, draws=1)
    for before_s in (min(befores), max(befores)):
        for each in (model, truth):
            each.after(before_s)
        assert model.forward_s(work) == pytest.approx(truth.forward_s(work), rel=0.1)


def test_a_few_usual_shapes_tell_roughly_what_work_takes():
    plans: list[LanePlan] = []
    executor = device(plans)
    found = rough_rates(executor, SchedulingConfig(max_batch_tokens=512, accustom_s=60.0))
    truth = LatencyModel(device_rates())
    model = LatencyModel(found)
    works = [PassWork.of(plan) for plan in plans if plan.spans]
    errors = [abs(model.forward_s(work) / truth.forward_s(work) - 1.0) for work in works]
    assert sum(errors) / len(errors) < 0.2
    guess, recorded = LatencyModel(Rates.guess_for(executor.info)), BackwardWork.of((400,))
    wrong, rough = (
        math.log(each.slice_s(recorded, 6) / truth.slice_s(recorded, 6)) for each in (guess, model)
    )
    assert abs(rough) < 0.5 * abs(wrong)
    assert model.guessed, "slices were not measured"
    assert not any(plan.opens or plan.slices or plan.updates for plan in plans)
    few: list[LanePlan] = []
    rough_rates(device(few), SchedulingConfig(max_batch_tokens=512, accustom_s=1e-9))
    assert 0 < len(few) < len(plans)


@pytest.mark.parametrize(
    "limits",
    [{"recording_tokens": 0}, {"num_blocks": 2}, {"max_model_len": 8}, {"num_blocks": 1}],
)
def test_whatever_does_not_fit_is_left_out(limits: dict[str, int]):
    plans: list[LanePlan] = []
    scheduling = SchedulingConfig(max_batch_tokens=4, max_sequences=1, accustom_s=60.0)
    found = rough_rates(device(plans, **limits), scheduling)
    assert all(plan.num_tokens <= 4 and bool(plan.spans) != bool(plan.copies) for plan in plans)
    seconds = (*found.forward, *found.slices, found.update_s)
    assert all(0.0 < value < 100.0 for value in seconds)


def test_every_plan_keeps_to_the_limits():
    plans: list[LanePlan] = []
    executor = device(plans, num_blocks=40, recording_tokens=100, max_model_len=256)
    probe(executor, LIMITS, seconds=0.5)
    assert len(plans) > 50
    for plan in plans:
        assert plan.num_tokens <= 512 and len(plan.spans) <= 32
        blocks = [block for span in plan.spans for block in span.block_tables[0]]
        assert len(blocks) == len(set(blocks)) and all(block < 40 for block in blocks)
        assert all(span.end < 256 for span in plan.spans)
        assert all(sum(opened.lengths) <= 100 for opened in plan.opens)
    assert executor.memory_bytes() == {"recorded_rows": 0}


def test_every_block_was_written_before_a_pass_reads_it():
    """Memory that was never written is read faster than a cache is."""
    plans: list[LanePlan] = []
    probe(device(plans, num_blocks=3000), LIMITS, seconds=0.5)
    written: set[int] = set()
    for plan in plans:
        written |= {copy.target for copy in plan.copies}
        assert all(written.issuperset(span.block_tables[0]) for span in plan.spans)
    assert 100 < len(written) <= 3000


def test_a_number_of_rows_that_is_new_runs_once_before_it_counts():
    plans: list[LanePlan] = []
    samples = probe(device(plans), LIMITS, seconds=1.0)
    ran = Counter(plan.num_tokens for plan in plans if plan.spans)
    counted = Counter(each.work.tokens for each in samples.passes)
    assert len(counted) > 30
    assert all(ran[rows] > count for rows, count in counted.items())
    opened = Counter(sum(each.lengths) for plan in plans for each in plan.opens)
    learned = Counter(work.rows for work, _, _ in samples.slices if not work.begun)
    assert learned and all(opened[rows] > count for rows, count in learned.items())


def test_micro_batches_have_few_sequences_and_many_of_many_lengths():
    """Of two alike, attention could not be told from the other work of a row."""
    plans: list[LanePlan] = []
    samples = probe(device(plans), LIMITS, seconds=1.0)
    opened = [each.lengths for plan in plans for each in plan.opens]
    assert {len(lengths) for lengths in opened} >= {1, 2, 4, 8}
    assert all(sum(lengths) >= 8 and min(lengths) > 0 for lengths in opened)
    counted = [(work.sequences, work.pairs) for work, _, _ in samples.slices]
    wanted = {(work.sequences, work.pairs) for work in map(BackwardWork.of, opened)}
    assert counted and wanted.issuperset(counted)


def test_equal_passes_tell_what_no_prediction_can_be_better_than():
    samples = probe(device([]), LIMITS, seconds=0.3)
    assert samples.repeats
    assert all(first == pytest.approx(again) for first, again in samples.repeats)
    samples.repeats = [(1.0, 1.25), (1.2, 1.0)]
    error = fit(samples, Rates.guess(weight_bytes=1, num_parameters=1, num_layers=1)).repeat
    assert error is not None and error.mape == pytest.approx(0.2)


def test_another_prober_has_its_turn_after_every_kind():
    """And what it says of its last pass decides how the next one is predicted."""
    counts: list[int] = []

    def between(samples: Samples) -> float:
        counts.append(len(samples.updates))
        return 123.0

    prober = Prober(device([]), LIMITS, between)
    for _ in range(40):
        prober.run(seconds=0.05)
        if 123.0 in {each.before_s for each in prober.samples.passes if each.work.decodes}:
            break
    else:
        pytest.fail("no pass comes after what the other one ran")
    prober.run(seconds=0.05)
    # The end of a run may come between a step and this turn.
    assert counts[0] == 1 and {each - last for last, each in pairwise(counts[1:])} <= {1, 2}


def test_a_second_time_adds_to_the_first_without_warming_up_again():
    prober = Prober(device([]), LIMITS)
    prober.run(seconds=0.1)
    first = list(prober.samples.passes)
    prober.run(seconds=0.1)
    assert prober.samples.passes[: len(first)] == first != prober.samples.passes


def test_an_engine_that_does_not_train_is_profiled_without_training():
    plans: list[LanePlan] = []
    samples = probe(device(plans, recording_tokens=0), LIMITS, seconds=0.2)
    assert samples.passes and not (samples.slices or samples.updates)
    assert not any(plan.opens for plan in plans)


def test_the_rules_of_recordings_are_kept():
    """The fake executor asserts them; it has no time of its own to tell."""
    executor = FakeExecutor(num_blocks=64, recording_tokens=64, max_model_len=64)
    limits = ProbeLimits(max_batch_tokens=32, max_sequences=4)
    # Its KV is checked too: spans that begin late would read what nobody has written.
    executor._write = lambda span: None
    executor._read = lambda span: (0, [0] * len(span.tokens))
    samples = probe(executor, limits, seconds=0.3)
    assert samples.slices and samples.updates
    assert not executor.trainers and not executor.recordings
