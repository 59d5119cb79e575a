"""Every variant of grouped LoRA compiles for an H100, without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopper import run_script


@pytest.mark.full
def test_all_variants_compile() -> None:
    found = run_script(Path(__file__).with_name("lora_on_hopper.py"))
    assert "_shrink" in found and "_expand" in found
