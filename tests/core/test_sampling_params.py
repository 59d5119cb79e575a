"""What counts as greedy, and which values are refused."""

from typing import Any

import pytest

from tandem.core.errors import InvalidRequest
from tandem.core.sampling import SamplingParams


@pytest.mark.parametrize("temperature", [0.0, 1e-50, 1e-6])
def test_a_vanishing_temperature_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).greedy


def test_a_low_temperature_is_not():
    assert not SamplingParams(temperature=0.01).greedy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 51}, "logprobs"),
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ],
)
def test_values_out_of_range_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        SamplingParams(**change).check(50)


def test_defaults_and_extremes_in_range_pass() -> None:
    SamplingParams().check(50)
    SamplingParams(temperature=0.0, top_p=1e-9, min_p=1.0, logprobs=50).check(50)
