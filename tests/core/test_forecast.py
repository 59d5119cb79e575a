from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.lengths import LEVELS, Forecast
from tandem.core.request import Request

FORECAST = Forecast((10.0, 20.0, 40.0, 80.0, 160.0), 1000, "history")


def test_the_quantiles_are_those_that_were_predicted() -> None:
    assert [FORECAST.quantile(level) for level in LEVELS] == pytest.approx(FORECAST.tokens)
    assert FORECAST.quantile(0.375) == pytest.approx(30.0)


def test_what_is_made_already_rules_the_shorter_ones_out() -> None:
    """Half of those over 40 tokens, which are half of all, are at most 80."""
    assert FORECAST.quantile(0.5, produced=40) == pytest.approx(80.0)


def test_longer_than_ever_is_not_about_to_end() -> None:
    assert FORECAST.quantile(0.5, produced=300) > 301.0
    assert FORECAST.quantile(0.5, produced=999) == 1000.0
    assert FORECAST.quantile(0.5, produced=1000) == 1000.0


@given(
    st.lists(st.floats(1.0, 500.0), min_size=5, max_size=5).map(sorted),
    st.integers(1, 500),
    st.integers(0, 600),
)
def test_quantiles_stay_in_bounds_and_order(
    tokens: list[float], max_tokens: int, produced: int
) -> None:
    cut = tuple(min(each, float(max_tokens)) for each in tokens)
    forecast = Forecast(cut, max_tokens, "history")
    found = [forecast.quantile(level, produced) for level in (0.0, 0.1, 0.5, 0.9, 1.0)]
    assert found == sorted(found)
    assert all(each <= max_tokens for each in found)
    assert all(each >= min(produced + 1, max_tokens) for each in found)


def test_an_answer_ends_where_the_ranges_of_its_quantiles_do() -> None:
    assert FORECAST.ends() == [
        (10.0, pytest.approx(0.05)),
        (20.0, pytest.approx(0.2)),
        (40.0, pytest.approx(0.25)),
        (80.0, pytest.approx(0.25)),
        (160.0, pytest.approx(0.2)),
        (320.0, pytest.approx(0.05)),
    ]
    assert FORECAST.ends(40) == [
        (80.0, pytest.approx(0.5)),
        (160.0, pytest.approx(0.4)),
        (320.0, pytest.approx(0.1)),
    ]
    assert FORECAST.ends(300) == [(600.0, 1.0)], "twice as long as it is already"
    assert FORECAST.ends(1000) == [(1000.0, 1.0)]


@given(
    st.lists(st.floats(1.0, 500.0), min_size=5, max_size=5).map(sorted),
    st.integers(1, 500),
    st.integers(0, 600),
)
def test_ends_are_ahead_and_in_order_and_one_of_them_comes(
    tokens: list[float], max_tokens: int, produced: int
) -> None:
    cut = tuple(min(each, float(max_tokens)) for each in tokens)
    ends = Forecast(cut, max_tokens, "history").ends(produced)
    places = [place for place, _ in ends]
    assert places == sorted(places)
    assert places[0] > produced or produced >= max_tokens
    assert max_tokens >= places[-1] or produced >= max_tokens
    assert sum(share for _, share in ends) == pytest.approx(1.0)


def test_a_request_takes_its_forecast_to_the_engine() -> None:
    request = Request("r", (1,), length=FORECAST)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request


def test_a_quantile_that_several_levels_share_is_ruled_out_once_it_is_passed() -> None:
    forecast = Forecast((16.0, 16.0, 16.0, 100.0, 100.0), 200, "batch")
    assert forecast.ends(16)[0][0] == forecast.ends(17)[0][0] == 100.0
    assert forecast.quantile(0.5, 16) == pytest.approx(100.0)
    assert forecast.quantile(0.5, 16) == pytest.approx(forecast.quantile(0.5, 17), rel=0.05)
