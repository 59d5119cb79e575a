"""The two searches against sorting and summing the whole row."""

from __future__ import annotations

import pytest
import torch

from tandem.model.selection import best_candidates, invert


@pytest.mark.parametrize("width", [1, 7, 50, 1000, 4099])
@pytest.mark.parametrize("count", [0, 1, 3, 50, 600])
def test_best_candidates_equal_a_full_sort(width, count):
    count = min(count, width)
    scores = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    expected, order = scores.sort(dim=-1, descending=True, stable=True)
    values, columns = best_candidates(scores, count)
    assert torch.equal(values, expected[:, :count])
    assert torch.equal(columns, order[:, :count])


def test_equals_are_ordered_by_column():
    scores = torch.zeros(1, 2000)
    scores[0, [1900, 3, 700]] = 1.0
    assert best_candidates(scores, 3)[1].tolist() == [[3, 700, 1900]]


@pytest.mark.parametrize("width", [1, 10, 256, 257, 1000])
def test_invert_equals_the_running_sum(width):
    generator = torch.Generator().manual_seed(width)
    weights = torch.rand(400, width, generator=generator) ** 8
    weights[:, ::3] = 0.0
    weights[:, -1] += 1e-3
    uniform = torch.rand(400, generator=generator, dtype=torch.float64)
    found = invert(weights, uniform)
    heights = weights.double().cumsum(-1) / weights.double().sum(-1, keepdim=True)
    after = heights.gather(1, found[:, None])[:, 0]
    before = after - (weights.double().gather(1, found[:, None])[:, 0] / weights.double().sum(-1))
    assert (weights.gather(1, found[:, None]) > 0).all()
    assert (uniform <= after + 1e-6).all() and (uniform >= before - 1e-6).all()


@pytest.mark.parametrize("width", [5, 1000])
def test_the_ends_of_the_interval_hit_the_outermost_weights(width):
    weights = torch.zeros(2, width)
    weights[:, 1] = weights[:, -2] = 0.1
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert invert(weights, ends).tolist() == [1, width - 2]
