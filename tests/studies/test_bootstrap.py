from __future__ import annotations

import random

import pytest

from benchmarks.reporting.bootstrap import difference, nested_difference, ratio


def test_interval_holds_a_steady_difference_tightly() -> None:
    rng = random.Random(0)
    values = [rng.gauss(0.0, 5.0) for _ in range(400)]
    paired = {str(place): [(value + 1.0, value)] for place, value in enumerate(values)}
    found = difference(paired)
    assert found.value == pytest.approx(1.0)
    assert found.low == pytest.approx(1.0) and found.high == pytest.approx(1.0)


def test_interval_of_noise_holds_zero_and_widens_with_clusters() -> None:
    rng = random.Random(1)
    half = [rng.gauss(0, 1) for _ in range(150)]
    noise = [*half, *(-value for value in half)]  # of mean 0
    single = {str(place): [(value, 0.0)] for place, value in enumerate(noise)}
    found = difference(single)
    assert found.low < 0.0 < found.high
    assert 0.18 < found.high - found.low < 0.28  # 2 x 1.96 / sqrt(300) = 0.226
    repeated = {key: values * 3 for key, values in single.items()}
    assert difference(repeated).high == pytest.approx(found.high)  # copies teach nothing


def test_ratio_of_means() -> None:
    found = ratio({"a": [(2.0, 1.0)], "b": [(4.0, 3.0), (6.0, 4.0)]})
    assert found.value == pytest.approx(12.0 / 8.0)
    assert found.low <= found.value <= found.high
    assert found == ratio({"a": [(2.0, 1.0)], "b": [(4.0, 3.0), (6.0, 4.0)]})


def test_nested_interval_is_as_wide_as_clusters_differ() -> None:
    rng = random.Random(2)
    shifts = [-0.3, -0.1, 0.0, 0.1, 0.2, 0.1]  # of whole clusters
    apart = {
        str(place): [(float(rng.random() < 0.5 + shift), 0.5) for _ in range(200)]
        for place, shift in enumerate(shifts)
    }
    found, plain = nested_difference(apart), difference(apart)
    assert found.value == pytest.approx(plain.value)
    assert found.low < plain.low and found.high > plain.high
    single = {
        f"{key}/{n}": [each] for key, values in apart.items() for n, each in enumerate(values)
    }
    drawn = difference(single)
    assert found.high - found.low > 2.0 * (drawn.high - drawn.low)


def test_nested_interval_of_one_cluster_is_that_of_its_observations() -> None:
    rng = random.Random(3)
    values = [(rng.gauss(0.2, 1.0), 0.0) for _ in range(300)]
    found = nested_difference({"all": values})
    single = difference({str(place): [each] for place, each in enumerate(values)})
    assert found.value == pytest.approx(single.value)
    assert found.low == pytest.approx(single.low, abs=0.02)
    assert found.high == pytest.approx(single.high, abs=0.02)
    assert found == nested_difference({"all": values})
