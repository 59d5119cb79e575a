"""The pace: how much slower a busy machine is just now, at all of its work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rates import guessed
from tandem.estimators.latency import LatencyModel
from tandem.estimators.linear import MEASURED, LinearModel
from tandem.estimators.terms import slice_features
from tandem.estimators.work import BackwardWork, PassWork


def known() -> LatencyModel:
    """A model whose rates are right, after a while of both kinds of work."""
    model = LatencyModel(replace(guessed().rates, measured=True, slices_measured=True))
    for rows in range(1, 30):
        observe_both(model, rows, 1.0)
    return model


def observe_both(model: LatencyModel, rows: int, factor: float) -> None:
    """A pass and a slice take `factor` times as long as the rates of `guessed` say."""
    truth, work, backward = guessed(), PassWork(), BackwardWork.of((rows,))
    work.span(0, rows)
    model.observe_forward(work, factor * truth.forward_s(work))
    model.observe_slice(backward, 2, factor * truth.slice_s(backward, 2))


def test_a_busy_machine_is_noticed_in_all_work_at_once():
    """Passes alone tell that the machine is slower: slices, decodes and updates are, too."""
    model, truth, work = known(), guessed(), PassWork()
    work.span(0, 30)
    assert model.update_s() == pytest.approx(truth.update_s(), rel=0.01)
    for _ in range(20):
        model.observe_forward(work, 1.4 * truth.forward_s(work))
    backward, decode = BackwardWork.of((50,)), PassWork()
    decode.decode(100)
    for found, usual in (
        (model.slice_s(backward, 3), truth.slice_s(backward, 3)),
        (model.forward_s(decode), truth.forward_s(decode)),
        (model.update_s(), truth.update_s()),
    ):
        assert 1.15 * usual < found < 1.5 * usual
    one, two = model.forward_s(decode), decode.copy()
    two.decode(100)
    # The longest context is no part of what is added.
    assert model.forward_s(two) - one == pytest.approx(model.added_decode_s(100), rel=0.05)
    assert model.added_s(decode) < one


def test_a_spell_is_over_as_soon_as_it_was_noticed():
    model = known()
    for factor in (1.4, 1.0):
        for rows in range(1, 30):
            observe_both(model, rows, factor)
    truth, work, backward = guessed(), PassWork(), BackwardWork.of((20,))
    work.span(0, 20)
    assert model.forward_s(work) == pytest.approx(truth.forward_s(work), rel=0.05)
    assert model.slice_s(backward, 3) == pytest.approx(truth.slice_s(backward, 3), rel=0.05)


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0])
def test_what_is_fitted_anew_does_not_count_the_pace_twice(factor: float):
    """A lasting change that is too large for the pace: the coefficients take the rest of it."""
    model, truth = known(), guessed()
    for place in range(60):
        work = PassWork()
        work.span(0, 1 + place % 29)
        observed_s = factor * truth.forward_s(work)
        if place >= 4:
            assert model.forward_s(work) == pytest.approx(observed_s, rel=0.06)
        model.observe_forward(work, observed_s)


def test_work_that_took_no_time_says_nothing_of_the_pace():
    model, work = known(), PassWork()
    work.span(0, 30)
    for _ in range(5):
        model.observe_forward(work, 1.4 * guessed().forward_s(work))
    before = model.update_s()
    model.observe_forward(work, 0.0)
    model.observe_slice(BackwardWork.of((50,)), 2, 0.0)
    assert model.update_s() == before > guessed().update_s()


def test_errors_are_those_of_what_was_predicted_at_that_pace():
    """Spells of twenty pieces of work: with the pace, they are predicted better than without."""
    model, truth = known(), guessed()
    plain = LinearModel(truth.rates.slices, MEASURED)
    for number in range(400):
        rows, factor = 1 + number % 37, (1.0, 1.3)[number // 20 % 2]
        backward = BackwardWork.of((rows,))
        seconds = factor * truth.slice_s(backward, 2)
        model.observe_slice(backward, 2, seconds)
        plain.observe(slice_features(backward, 2), seconds)
    assert model.backward.errors.mean < 0.8 * plain.errors.mean


def test_the_first_samples_say_nothing_of_the_pace():
    model, truth = guessed(), guessed()
    for rows in range(1, 10):
        observe_both(model, rows, 3.0)
    assert model.update_s() == truth.update_s()


def test_what_is_met_in_a_spell_does_not_pay_for_the_pace_twice():
    """The pace tells that the machine is slow: what is new, or rare, is not dearer for it."""
    truth, factor = guessed(), 1.35
    model = LatencyModel(replace(truth.rates, slices_measured=False))
    for spell in (1.0, factor):
        for rows in range(1, 30):
            work = PassWork()
            work.span(0, rows)
            model.observe_forward(work, spell * truth.forward_s(work))
    backward = BackwardWork.of((40,))
    for _ in range(9):
        model.observe_slice(backward, 2, factor * truth.slice_s(backward, 2))
        model.observe_update(factor * truth.update_s())
    for found, usual in (
        (model.slice_s(backward, 2), truth.slice_s(backward, 2)),
        (model.update_s(), truth.update_s()),
    ):
        assert found == pytest.approx(factor * usual, rel=0.03)
