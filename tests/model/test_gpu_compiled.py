"""Triton's rows and products compile for an H100, without spilled registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopper import run_script

pytest.importorskip("triton")


@pytest.mark.full
def test_rows_and_products_compile_for_an_h100() -> None:
    found = run_script(Path(__file__).parent / "gpu" / "layer_variants.py").splitlines()
    assert len(found) > 50
    assert [line for line in found if not line.endswith("stack 0")] == []
