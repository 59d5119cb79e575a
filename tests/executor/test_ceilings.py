"""Ceilings are measured in a second or two, also of arithmetic that a device does not have."""

from __future__ import annotations

import pytest

from tandem.executor import ceilings


@pytest.mark.parametrize(
    ("flops_per_s", "most_side"), [(1e9, 512), (1e10, 1024), (2e12, 2048), (9e14, 2048)]
)
def test_the_product_is_as_large_as_there_is_time_for(monkeypatch, flops_per_s, most_side):
    sides = []

    def product_s(side, device, kind):
        sides.append(side)
        return 2.0 * side**3 / flops_per_s

    monkeypatch.setattr(ceilings, "_product_s", product_s)
    monkeypatch.setattr(ceilings, "_time", lambda call, device: 0.01)
    found = ceilings.measure_ceilings("cpu", "float32")
    assert max(sides) == most_side
    assert found.flops == pytest.approx(flops_per_s)


def test_on_this_device():
    found = ceilings.measure_ceilings("cpu", "float32")
    assert 1e8 < found.flops < 1e17 and 1e7 < found.bytes_per_s < 1e15
