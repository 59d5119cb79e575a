"""The kernels compile for an H100, as they would be launched there."""

from __future__ import annotations

from pathlib import Path

import pytest

from devices import HAS_TRITON
from hopper import run_script

HERE = Path(__file__).parent


@pytest.mark.full
@pytest.mark.skipif(not HAS_TRITON, reason="no Triton here")
def test_attention_compiles_for_an_h100():
    lines = run_script(HERE / "attention_variants.py").splitlines()
    names = {"_attend", "_turn_and_store", "_store"}
    assert {name for line in lines for name in names if f" {name} " in line} == names
    # Next to nothing is spilled from registers; float32 has no matrix units and may spill some.
    most = {line: 256 if "float32" in line else 32 for line in lines}
    spilled = [line for line in lines if int(line.split()[-1]) > most[line]]
    assert spilled == []
