"""A linear model forgives a hiccup, follows a change, and lays surprises to what is new."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.estimators.linear import MEASURED, LinearModel


def test_one_stalled_iteration_does_not_ruin_the_fit():
    model = LinearModel((0.01, 0.001))
    for tokens in [*range(1, 60)]:
        model.observe((1.0, tokens), 0.02 + 0.002 * tokens)
    before = model.predict((1.0, 30))
    model.observe((1.0, 30), 5.0)
    assert model.predict((1.0, 30)) < 1.5 * before
    for tokens in range(1, 20):
        model.observe((1.0, tokens), 0.02 + 0.002 * tokens)
    assert model.predict((1.0, 30)) == pytest.approx(before, rel=0.1)


def test_it_follows_a_device_that_has_become_slower():
    model = LinearModel((0.01, 0.001))
    for factor in (1.0, 10.0):
        for tokens in range(1, 40):
            model.observe((1.0, tokens), factor * (0.02 + 0.002 * tokens))
    assert model.predict((1.0, 20)) == pytest.approx(0.6, rel=0.1)


def test_a_slow_spell_of_one_kind_of_work_says_nothing_of_another():
    """Passes without recording become ten times slower: recording is not thought dearer for it."""
    model = LinearModel((0.01, 0.001, 0.02))
    for rows in range(1, 40):
        recorded = float(rows % 2)
        model.observe((1.0, rows, recorded), 0.02 + 0.002 * rows + 0.03 * recorded)
    before = model.coefficients[2]
    for rows in range(1, 12):
        model.observe((1.0, rows, 0.0), 10 * (0.02 + 0.002 * rows))
    assert model.predict((1.0, 20, 0.0)) == pytest.approx(0.6, rel=0.1)
    assert model.coefficients[2] < 2 * before


def test_what_is_new_in_surprises_is_blamed_for_them():
    """Recording is thought a hundred or a thousand times too dear; one pass in ten records."""
    for thought_s in (3.0, 30.0):
        model = LinearModel((0.02, 0.002, thought_s), variance=MEASURED)
        for rows in range(1, 60):
            recorded = float(rows % 10 == 9)
            model.observe((1.0, rows, recorded), 0.02 + 0.002 * rows + 0.03 * recorded)
            assert model.predict((1.0, 30, 0.0)) == pytest.approx(0.08, rel=0.25)
        assert model.predict((1.0, 30, 0.0)) == pytest.approx(0.08, rel=0.05)
        assert model.predict((1.0, 30, 1.0)) == pytest.approx(0.11, rel=0.2)


def test_surprises_of_one_kind_make_no_stall_of_another_believable():
    model = LinearModel((0.02, 0.002, 0.03), variance=MEASURED)
    for _ in range(3):
        model.observe((1.0, 30, 1.0), 1.0)
    for rows in range(1, 101):
        model.observe((1.0, rows, 0.0), 0.02 + 0.002 * rows)
    model.observe((1.0, 30, 0.0), 0.8)
    assert model.predict((1.0, 30, 0.0)) < 0.1


def test_a_spell_that_begins_with_new_work_is_not_blamed_on_it():
    """All gets three times slower, and the first passes of it record few rows."""
    model = LinearModel((0.02, 0.002, 0.03), variance=MEASURED)
    for rows in range(1, 60):
        recorded = float(rows % 2)
        model.observe((1.0, rows, recorded), 0.02 + 0.002 * rows + 0.03 * recorded)
    for rows in range(30, 34):
        model.observe((1.0, rows, 1.0), 3 * (0.02 + 0.002 * rows + 0.03))
    assert model.predict((1.0, 30, 0.0)) == pytest.approx(3 * 0.08, rel=0.1)
    assert model.coefficients[2] == pytest.approx(3 * 0.03, rel=0.3)


def test_what_was_measured_outlives_a_slow_first_sample():
    measured, guessed_one = LinearModel((0.02,), variance=MEASURED), LinearModel((0.02,))
    for model in (measured, guessed_one):
        model.observe((1.0,), 0.2)
    assert measured.predict((1.0,)) < 0.03 and guessed_one.predict((1.0,)) > 0.15


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 1000), st.floats(1e-6, 1000)), max_size=60)
)
@example([(1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (7.0, 1.0, 1.0), (1.0, 5e-324, 1.0)])
def test_more_work_is_never_predicted_to_be_cheaper(samples):
    model = LinearModel((0.01, 0.001, 0.0001))
    for first, second, seconds in samples:
        model.observe((1.0, first, second), seconds)
        assert all(value > 0.0 and math.isfinite(value) for value in model.coefficients)
