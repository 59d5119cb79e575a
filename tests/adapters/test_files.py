"""What identifies an adapter's content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.adapters.files import inspect_adapter
from tandem.core.errors import AdapterError


def write(folder: Path, weights: bytes = b"w", **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8} | config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def test_equal_content_has_one_hash_wherever_it_lies(tmp_path):
    one = inspect_adapter(write(tmp_path / "a"))
    two = inspect_adapter(write(tmp_path / "b", base_model_name_or_path="renamed"))
    assert one.content_hash == two.content_hash and one.path != two.path


@pytest.mark.parametrize(
    "change",
    [
        {"weights": b"x"},
        {"lora_alpha": 9},
        {"r": 8},
        {"use_rslora": True},
        {"rank_pattern": {"q": 2}},
    ],
)
def test_whatever_changes_the_arithmetic_changes_the_hash(tmp_path, change):
    before = inspect_adapter(write(tmp_path / "a")).content_hash
    assert inspect_adapter(write(tmp_path / "a", **change)).content_hash != before


def test_what_is_no_adapter_is_refused(tmp_path):
    with pytest.raises(AdapterError, match="no adapter directory"):
        inspect_adapter(tmp_path / "nowhere")
    with pytest.raises(AdapterError, match="adapter_config"):
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
        inspect_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{not json")
    with pytest.raises(AdapterError, match="cannot read"):
        inspect_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="cannot read"):
        inspect_adapter(tmp_path)
