"""The time model finds the rates of a device, predicts by them, and owns up to its errors."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rates import guessed
from tandem.core.plan import (
    BackwardSlice,
    Draw,
    KeptLayers,
    LanePlan,
    OpenMicroBatch,
    RecordTarget,
    SliceResult,
    Span,
    StepResult,
    UpdateResult,
)
from tandem.core.sampling import SamplingParams
from tandem.estimators.latency import (
    LatencyModel,
    Rates,
)
from tandem.estimators.terms import FORWARD_TERMS, SLICE_TERMS, coldness
from tandem.estimators.work import BackwardWork, PassWork, pairs_of


def passes(rng: random.Random, count: int) -> list[PassWork]:
    """Decodes, prompts and training as they occur together."""
    found = []
    for _ in range(count):
        work = PassWork()
        for _ in range(rng.randint(0, 16)):
            work.decode(rng.randint(20, 400))
        if rng.random() < 0.5 or not work.decodes:
            work.span(rng.choice((0, 64)), rng.randint(16, 200), draws=1)
        if rng.random() < 0.5:
            rows = rng.randint(20, 120)
            work.span(0, rows, scored=rows // 2, recorded=rows)
        found.append(work)
    return found


def device_s(work: PassWork) -> float:
    seconds = 0.05 + 0.0012 * work.decodes + 0.0008 * work.rows
    seconds += 4e-6 * (work.context + work.prefix)
    seconds += 2e-7 * work.pairs + 0.001 * work.draws + 0.002 * work.scored
    return seconds + (0.02 + 0.0003 * work.recorded if work.recorded else 0.0)


def test_it_finds_the_rates_and_reports_its_error():
    rng = random.Random(0)
    model = guessed()
    for work in passes(rng, 300):
        model.observe_forward(work, device_s(work) * rng.uniform(0.97, 1.03))
    for work in passes(rng, 50):
        assert model.forward_s(work) == pytest.approx(device_s(work), rel=0.06)
    assert model.forward.errors.mean < 0.05 and abs(model.forward.errors.bias) < 0.05
    assert 0.01 < model.forward.errors.p95 < 0.1
    assert model.forward.errors.samples == 300


def test_first_predictions_are_of_the_right_size():
    """0.5B parameters in bf16: a decode streams a gigabyte; a row needs a gigaflop."""
    model, decode, prompt = guessed(), PassWork(), PassWork()
    decode.decode(100)
    prompt.span(0, 256, draws=1)
    assert 0.02 < model.forward_s(decode) < 0.2
    assert 0.1 < model.forward_s(prompt) < 2.0
    assert model.slice_s(BackwardWork.of((256,)), 24) > model.forward_s(prompt)
    assert model.forward_s(PassWork()) == 0.0 and model.slice_s(BackwardWork.of((100,)), 0) == 0.0


def test_of_prefill_and_decode_the_shorter_counts_rho_times():
    """DESIGN section 4: mixed = max + rho * min, never less than the larger part."""
    terms = dict.fromkeys(FORWARD_TERMS, 1e-9) | {"pass": 0.02, "decode": 0.001, "row": 0.002}
    for rho in (0.0, 0.5, 1.0):
        model = LatencyModel(Rates(tuple(terms.values()), (1e-3,) * len(SLICE_TERMS), 0.01, rho))
        for decodes, rows in ((10, 4), (10, 100), (0, 5), (0, 50)):
            work = PassWork(decodes=decodes, context=decodes, longest=1, rows=rows)
            decode_s, prefill_s = 0.02 + 0.001 * decodes, 0.002 * rows
            expected = max(decode_s, prefill_s) + rho * min(decode_s, prefill_s)
            assert model.forward_s(work) == pytest.approx(expected, rel=1e-4)


def test_pairs_are_those_of_a_causal_mask():
    assert pairs_of(0, 4) == 1 + 2 + 3 + 4
    assert pairs_of(10, 3) == 11 + 12 + 13
    assert pairs_of(0, 7) == pairs_of(0, 3) + pairs_of(3, 4)


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.2, 1.0]))
def test_a_prediction_is_what_its_features_add_up_to(seed, rho):
    """Predictions take a short cut past the features that the model learns from."""
    rng = random.Random(seed)
    rates = Rates(
        tuple(rng.uniform(1e-6, 1e-2) for _ in FORWARD_TERMS), (1e-3,) * len(SLICE_TERMS), 0.01, rho
    )
    model = LatencyModel(rates)
    whole = PassWork(whole=True)
    whole.span(0, 30, scored=10, recorded=30)
    for work in [whole, *passes(rng, 5)]:
        model.after(rng.uniform(0.0, 0.1))
        predicted = model.forward.predict(model._features(work))
        assert model.forward_s(work) == pytest.approx(predicted, rel=1e-9)
    alone = PassWork()
    alone.decode(rng.randint(1, 4000))
    assert model.added_decode_s(alone.context) == pytest.approx(model.added_s(alone), rel=1e-6)


def recorded_plan(lengths: list[int], recorded: list[int], beside: int = 0) -> LanePlan:
    """Opens a micro-batch of sequences of such lengths, and records so much of each of them."""
    spans = [
        Span(place, 0, (1,) * rows, ((place,),), None, record=RecordTarget(7, place))
        for place, rows in enumerate(recorded)
    ]
    if beside:
        draw = Draw(9, 0, 0, SamplingParams())
        spans.append(Span(9, 0, (1,) * beside, ((9,),), None, (draw,)))
    return LanePlan(0, 0, tuple(spans), opens=(OpenMicroBatch(7, "t", 0, tuple(lengths)),))


def test_a_pass_of_whole_micro_batches_keeps_more_and_takes_longer():
    terms = dict.fromkeys(FORWARD_TERMS, 1e-9) | {"recording": 0.01, "whole": 0.002}
    terms |= {"whole_row": 1e-4}
    model = LatencyModel(Rates(tuple(terms.values()), (1e-3,) * len(SLICE_TERMS), 0.01))
    plans = {
        "whole": recorded_plan([12, 8], [12, 8]),
        "beside a decode": recorded_plan([12, 8], [12, 8], beside=1),
        "beside a prompt": recorded_plan([12, 8], [12, 8], beside=5),
        "in part": recorded_plan([12, 9], [12, 8]),
        "goes on": replace(recorded_plan([12, 8], [12, 8]), opens=()),
    }
    later = OpenMicroBatch(8, "t", 0, (30,))
    plans["whole, another opened"] = replace(plans["whole"], opens=(*plans["whole"].opens, later))
    works = {name: PassWork.of(plan) for name, plan in plans.items()}
    for name, work in works.items():
        assert work.whole is name.startswith("whole")
        assert model.forward_s(work) == pytest.approx(0.014 if work.whole else 0.01, rel=1e-3)
    assert works["whole"].copy() == works["whole"]


def test_a_long_pass_leaves_cold_caches_and_one_beyond_that_no_colder_ones():
    terms = dict.fromkeys(FORWARD_TERMS, 1e-9) | {"pass": 0.01, "cold": 0.004}
    rates = Rates(tuple(terms.values()), (1e-3,) * len(SLICE_TERMS), 0.01, measured=True)
    model, work = LatencyModel(rates), PassWork(decodes=1, context=1, longest=1)
    assert model.forward_s(work) == pytest.approx(0.014, rel=1e-3), "nothing has run"
    for before_s, expected in ((1e-9, 0.010), (0.02, 0.012), (0.06, 0.013), (100.0, 0.014)):
        model.after(before_s)
        assert model.forward_s(work) == pytest.approx(expected, rel=1e-3)
        assert model.added_s(work) == pytest.approx(0.0, abs=1e-6), "it runs anyway"


def test_whatever_is_executed_tells_how_the_next_pass_finds_the_caches():
    """Also what is not learned from; without a pass, or where it was lost, things stay."""
    model = guessed()
    decode = Span(0, 9, (1,), ((0, 1),), None, (Draw(0, 0, 0, SamplingParams()),))

    def after(spans: tuple[Span, ...], seconds: float, *, stopped: bool = False) -> float:
        result = StepResult(0, "", seconds, stopped=stopped)
        model.observe(LanePlan(0, "", spans), result, lambda _: None)
        return model._cold

    assert [after((decode,), each) for each in (0.03, 0.04)] == [coldness(0.03), coldness(0.04)]
    assert model.forward.errors.samples == 1, "the second is like the first"
    assert after((), 0.9) == after((decode,), 0.0) == coldness(0.04)
    assert after((decode, decode), 0.01, stopped=True) == coldness(0.01)
    model.observe_decodes(PassWork.of(LanePlan(4, "", (decode,))), 0.06)
    assert model._cold == coldness(0.06)


def test_it_learns_what_cold_caches_cost():
    """Twice what it was told. It takes its time: passes are long here, and caches mostly cold."""
    rng = random.Random(0)
    told = guessed().rates
    model, seconds = LatencyModel(replace(told, forward=(*told.forward[:-1], 0.01))), 0.1
    model.after(seconds)
    for work in passes(rng, 2000):
        before_s, seconds = seconds, device_s(work) + 0.02 * coldness(seconds)
        model.observe_forward(work, seconds)
    missed = []
    for work in passes(rng, 50):
        for before_s in (1e-3, 0.5):
            model.after(before_s)
            expected = device_s(work) + 0.02 * coldness(before_s)
            missed.append(abs(model.forward_s(work) / expected - 1.0))
    assert sum(missed) / len(missed) < 0.03
    assert model.rates.forward[-1] == pytest.approx(0.02, rel=0.2)


def test_a_prompt_that_goes_on_reads_what_came_before():
    model, fresh, later = guessed(), PassWork(), PassWork()
    fresh.span(0, 16)
    later.span(4000, 16)
    beyond_pairs = replace(later, pairs=fresh.pairs)
    decode = PassWork(decodes=1, context=4000, longest=1)
    without = PassWork(decodes=1, context=0, longest=1)
    read_s = model.forward.coefficients[2] * model._kv[0] * 4.0
    assert model.forward_s(beyond_pairs) - model.forward_s(fresh) == pytest.approx(read_s)
    assert model.forward_s(decode) - model.forward_s(without) > read_s
    assert later.copy() == later


def test_costs_of_learning_are_guesses_until_they_were_observed_or_measured():
    model = guessed()
    for _ in range(30):
        assert model.guessed
        model.observe_slice(BackwardWork.of((100,)), 2, 0.1)
    assert not model.guessed
    assert LatencyModel(replace(guessed().rates, slices_measured=False)).guessed
    assert not LatencyModel(guessed().rates).guessed


def test_layers_within_a_time_take_that_time():
    model = guessed(weight_bytes=0, num_parameters=10**9, num_layers=10)
    for layers in (1, 3, 9):
        for recorded in (
            BackwardWork.of((100,)),
            BackwardWork.of((100,), 0.5, 0.5),
            BackwardWork.of((100,), begun=True),
        ):
            seconds = model.slice_s(recorded, layers)
            assert model.layers_within(recorded, seconds) == layers
            assert model.layers_within(recorded, seconds * 0.999) == layers - 1
    assert model.layers_within(BackwardWork.of((100,)), 0.0) == 0


def test_what_was_kept_of_a_forward_makes_a_slice_cheaper_by_as_much_as_it_does():
    rng, model = random.Random(0), guessed()

    def device_s(recorded: BackwardWork, layers: int) -> float:
        each = 2e-5 + 1.2e-5 * recorded.again + 5e-6 * recorded.rest
        first_s = 0.0 if recorded.begun else 3e-3 + 1e-5 * recorded.rows
        layer_s = 2e-3 + 1.5e-3 * recorded.again + each * recorded.rows
        return 1e-3 + first_s + layer_s * layers

    kinds = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.25, 0.75)]
    for _ in range(300):
        recorded, layers = (
            BackwardWork.of((rng.randint(8, 900),), *rng.choice(kinds)),
            rng.randint(1, 24),
        )
        recorded = recorded.after_slice() if rng.random() < 0.5 else recorded
        model.observe_slice(recorded, layers, device_s(recorded, layers))
    for kind in kinds:
        first = BackwardWork.of((400,), *kind)
        for recorded in (first, first.after_slice()):
            assert model.slice_s(recorded, 6) == pytest.approx(device_s(recorded, 6), rel=0.03)


def test_attention_and_the_number_of_sequences_make_a_slice_dearer():
    """Equal rows: eight sequences, or one that attends to eight times as many positions."""
    rng, model = random.Random(0), guessed()

    def device_s(work: BackwardWork, layers: int) -> float:
        pairs_s = (4e-8 + 2e-8 * work.again) * work.pairs
        return 1e-3 + layers * (2e-3 + 2e-5 * work.rows + 2e-4 * work.sequences + pairs_s)

    for _ in range(1500):
        lengths = [rng.randint(8, 500) for _ in range(rng.choice((1, 2, 4, 8)))]
        work = BackwardWork.of(lengths, rng.choice((0.0, 1.0)), begun=True)
        model.observe_slice(work, layers := rng.randint(1, 24), device_s(work, layers))
    for lengths in ((125,) * 8, (1000,), (500, 500)):
        for again in (0.0, 1.0):
            work = BackwardWork.of(lengths, again, begun=True)
            assert model.slice_s(work, 6) == pytest.approx(device_s(work, 6), rel=0.03)


def test_the_work_of_a_backward_counts_every_sequence_for_itself():
    work = BackwardWork.of((3, 1, 2))
    assert (work.rows, work.sequences, work.pairs) == (6, 3, (1 + 2 + 3) + 1 + (1 + 2))
    after = work.with_kept(KeptLayers(0, 0.5, 0.25)).after_slice()
    assert after == BackwardWork(6, 3, work.pairs, 0.25, 0.25, begun=True)


def test_it_learns_from_plans_and_results():
    model = guessed(weight_bytes=0, num_parameters=10**6, num_layers=4)
    span = Span(0, 0, (1, 2, 3), ((0,),))
    for _ in range(20):
        result = StepResult(
            0, "device", 0.5, forward_s=0.1, slices=(SliceResult(7, 4, 2, 0.3),),
            updates=(UpdateResult("t", 1, True, 1.0, 1.0, 0.1),),
        )  # fmt: skip
        model.observe(LanePlan(0, "device", (span,)), result, lambda number: BackwardWork.of((50,)))
    assert model.forward_s(PassWork(rows=3, pairs=6)) == pytest.approx(0.1, rel=0.02)
    assert model.slice_s(BackwardWork.of((50,)), 2) == pytest.approx(0.3, rel=0.02)
    assert model.update_s() == pytest.approx(0.1, rel=0.02)


def test_a_failed_slice_or_an_unknown_one_teaches_nothing():
    model = guessed(weight_bytes=0, num_parameters=10**6, num_layers=4)
    result = StepResult(0, "device", 0.5, slices=(SliceResult(7, 4, 2, 0.3, "broken"),))
    model.observe(LanePlan(0, "device", ()), result, lambda number: BackwardWork.of((50,)))
    assert model.backward.errors.samples == 0 and math.isnan(model.backward.errors.mean)


def test_decodes_like_the_last_ones_are_learned_from_now_and_then():
    model = guessed(num_parameters=10**8, num_layers=4)

    def iteration(decodes: int, slices: tuple[BackwardSlice, ...] = ()) -> int:
        spans = tuple(Span(place, 9, (5,), ((0,),), None, ()) for place in range(decodes))
        before = model.forward.errors.samples
        result = StepResult(0, "device", 0.05, forward_s=0.05)
        model.observe(LanePlan(0, "device", spans, slices=slices), result, lambda number: 0)
        return model.forward.errors.samples - before

    taught = [iteration(8) for _ in range(17)]
    assert [place for place, learned in enumerate(taught) if learned] == [0, 8, 16]
    assert [iteration(decodes) for decodes in (8, 7, 8, 8)] == [0, 1, 1, 0]
    assert iteration(8, (BackwardSlice(0, 4, 3, ()),)) == 1
