"""What identifies an adapter's content."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tandem.adapters.configuration import MOST_CONFIG_BYTES
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
    with pytest.raises(AdapterError, match="is not JSON"):
        inspect_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="does not hold a configuration"):
        inspect_adapter(tmp_path)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b" " * (MOST_CONFIG_BYTES + 1), "more than 1048576 bytes"),
        (b'{"r": ' + b"9" * 5000 + b"}", "not JSON"),
        ('{"r": "\u00fc"}'.encode("latin-1"), "UTF-8"),
        ("{}".encode("utf-16"), "UTF-8"),
        (b"", "not JSON"),
    ],
    ids=range(7),
)
def test_a_configuration_that_cannot_be_read_says_why(tmp_path, raw, reason):
    folder = write(tmp_path / "a")
    (folder / "adapter_config.json").write_bytes(raw)
    with pytest.raises(AdapterError, match=reason):
        inspect_adapter(folder)


def test_a_byte_order_mark_is_read_over(tmp_path):
    plain = inspect_adapter(write(tmp_path / "a"))
    marked = tmp_path / "a" / "adapter_config.json"
    marked.write_bytes(b"\xef\xbb\xbf" + marked.read_bytes())
    assert inspect_adapter(tmp_path / "a").content_hash == plain.content_hash


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target_modules": 5}, "target_modules"),
        ({"target_modules": ["q", 5]}, "target_modules"),
        ({"target_modules": ["q"] * 5000}, "target_modules"),
        ({"target_modules": "([a-z0-9_.]+)+!"}, "a repeated group"),
        ({"exclude_modules": "(.*)*!"}, "a repeated group"),
        ({"exclude_modules": {}}, "exclude_modules"),
        ({"rank_pattern": ["q"]}, "rank_pattern"),
        ({"rank_pattern": {"(": 1}}, "a bracket is missing"),
        ({"rank_pattern": {"(a+)+!": 1}}, "a repeated group"),
        ({"rank_pattern": {"q": "8"}}, "rank_pattern of 'q'"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern of 'q'"),
        ({"rank_pattern": {f".*.*{n}": 8 for n in range(400)}}, "too long to match"),
        ({"rank_pattern": {str(n): 8 for n in range(501)}}, "more than 500"),
        ({"alpha_pattern": {"q": float("nan")}}, "alpha_pattern of 'q'"),
        ({"alpha_pattern": {"q": 10**400}}, "alpha_pattern of 'q'"),
        ({"layers_pattern": "(a|b)+"}, "layers_pattern"),
        ({"layers_pattern": ["layers", "a|b"]}, "layers_pattern"),
        ({"layers_pattern": 5}, "layers_pattern"),
        ({"layers_to_transform": "1"}, "layers_to_transform"),
        ({"layers_to_transform": [1, None, 1.5]}, "layers_to_transform"),
        ({"r": 0}, "r must"),
        ({"r": True}, "r must"),
        ({"r": 8.5}, "r must"),
        ({"lora_alpha": float("inf")}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": "16"}, "lora_alpha"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_of_the_wrong_kind_are_named(tmp_path, change, named):
    with pytest.raises(AdapterError, match=re.escape(named)):
        inspect_adapter(write(tmp_path / "a", **change))


def test_what_peft_writes_is_taken(tmp_path):
    each = {f"model.layers.{n}.self_attn.q_proj": 8 for n in range(224)}
    inspect_adapter(
        write(
            tmp_path / "a",
            target_modules=["q_proj", "v_proj"],
            exclude_modules=None,
            rank_pattern=each,
            alpha_pattern=dict.fromkeys(each, 16.0),
            layers_to_transform=[0, 1],
            layers_pattern="layers",
            r=8,
            lora_alpha=16,
        )
    )
