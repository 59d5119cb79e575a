"""What the GPU kernels of a layer's gradient become on an H100, without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hopper import run_script

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]


def test_every_variant_compiles_and_spills_nothing():
    found = run_script(Path(__file__).parent / "gpu" / "gradient_variants.py").splitlines()
    assert len(found) > 50
    assert [line for line in found if not line.endswith("stack 0")] == []
