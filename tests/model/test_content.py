"""A model's hash names its parameters: any change of them, their names or their type shows."""

from __future__ import annotations

import torch
from torch import nn

from tandem.model.content import weights_hash


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 10)).to(dtype)


def test_equal_parameters_have_equal_hashes() -> None:
    before = torch.get_num_threads()
    first = weights_hash(_model())
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        assert weights_hash(_model()) == first
    finally:
        torch.set_num_threads(before)
    assert len(first) == 32


def test_any_change_shows() -> None:
    seen = {weights_hash(_model()), weights_hash(_model(torch.bfloat16))}
    for place in (0, 1, 59_999):
        model = _model()
        with torch.no_grad():
            weight = next(model.parameters())
            weight.view(-1)[place] = torch.nextafter(weight.view(-1)[place], torch.tensor(9.0))
        seen.add(weights_hash(model))
    seen.add(weights_hash(nn.Sequential(nn.Identity(), *_model())))
    assert len(seen) == 6
