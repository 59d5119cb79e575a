"""The size of an update."""

from __future__ import annotations

import pytest
import torch

from tandem.core.training import OptimizerSpec
from tandem.training.optimizer import Optimizer


def moved(scale: float, factor: float = 1.0) -> float:
    """How far some updates move a parameter whose gradients are all multiplied by `factor`."""
    parameter = torch.zeros(4)
    optimizer = Optimizer(parameter, OptimizerSpec(learning_rate=1e-2))
    for step in range(5):
        optimizer.step(torch.tensor([1.0, -2.0, 0.5, 3.0]) * factor, step, scale)
    return float(parameter.norm())


def test_adam_ignores_a_factor_that_all_gradients_share() -> None:
    assert moved(1.0, 0.01) == pytest.approx(moved(1.0), rel=1e-3)


@pytest.mark.parametrize("scale", [0.5, 0.1, 0.01])
def test_a_scale_moves_the_parameters_less(scale: float) -> None:
    assert moved(scale) == pytest.approx(scale * moved(1.0), rel=1e-5)
