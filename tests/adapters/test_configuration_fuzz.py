"""Whatever an adapter's configuration says, it is read or refused with a reason, and in time."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tandem.adapters.files import inspect_adapter
from tandem.core.errors import AdapterError
from tandem.model.lora_files import LinearShape, read_lora

EXAMPLES = 3000 if os.environ.get("TANDEM_TEST_FULL") else 150
MODULES = [f"model.layers.{n}.self_attn.{name}_proj" for n in range(3) for name in ("q", "v")]
LINEARS = {name: LinearShape(4, 4) for name in MODULES}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.integers(-2, 20)
    | st.floats()
    | st.sampled_from(["q_proj", ".*q_proj", "(a+)+", "layers", "LORA", "none", "gaussian", "("])
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["q_proj", "(", ".*"]), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [
        "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "init_lora_weights", "bias", "use_dora", "modules_to_save", "auto_mapping", "revision",
        "task_type", "fan_in_fan_out", "unknown",
    ]
)  # fmt: skip
GOOD: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"],
}  # fmt: skip


def adapter(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"base_model.model.{name}.lora_{half}.weight": torch.ones(shape)
        for name in MODULES
        for half, shape in (("A", (2, 4)), ("B", (4, 2)))
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def load(folder: Path) -> int:
    """As the engine does: what the configuration is is checked before it is used."""
    inspect_adapter(folder)
    return len(read_lora(folder, LINEARS, device=torch.device("cpu"), dtype=torch.float32))


@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEYS, JSON, min_size=1, max_size=3))
def test_no_configuration_makes_the_reader_fail(change: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        folder = adapter(Path(directory), {**GOOD, **change})
        begun_s = time.process_time()
        try:
            assert load(folder) == len(MODULES)
        except AdapterError as error:
            assert str(error)
        assert time.process_time() - begun_s < 2.0


def test_the_plain_one_is_read(tmp_path: Path) -> None:
    assert load(adapter(tmp_path, GOOD)) == len(MODULES)
