"""What counts as greedy."""

import pytest

from tandem.core.sampling import SamplingParams


@pytest.mark.parametrize("temperature", [0.0, 1e-50, 1e-6])
def test_a_vanishing_temperature_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).greedy


def test_a_low_temperature_is_not():
    assert not SamplingParams(temperature=0.01).greedy
