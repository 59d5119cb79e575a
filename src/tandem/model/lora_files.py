"""Reads a PEFT LoRA directory into tensors, or says by name why it cannot.

Settings that this reader does not know are refused if they are set, since each may change the
arithmetic. Shapes are checked against the model's linear layers. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tandem.core.errors import AdapterError

_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "init_lora_weights", "bias",
}  # fmt: skip
# Settings that only affect training, initial values or bookkeeping.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
    "peft_version", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config",
    "eva_config", "ensure_weight_tying",
}  # fmt: skip
# Initialisations that keep the base weights. The others (PiSSA, ...) change them.
_KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Widths of a linear layer's input and output."""

    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """One layer's update: out += (x @ a.T @ b.T) * scale; `a` [rank, in], `b` [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float


Lora = dict[str, LoraWeights]


def read_lora(
    path: str | Path,
    linears: Mapping[str, LinearShape],
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_rank: int = 0,
) -> Lora:
    """Weights by module name, on `device` in `dtype`.

    `linears` are the layers that can be adapted. A `max_rank` of 0 means no limit. Raises
    `AdapterError` for anything missing, unsupported, misshaped, too large or not finite.
    """
    folder = Path(path)
    config = _read_config(folder)
    _refuse_unsupported(config)
    halves = _read_tensors(folder)
    _check_targets(config, halves, linears)
    adapter: Lora = {}
    for module, pair in halves.items():
        a, b = _checked_pair(module, pair, linears[module])
        rank = _by_pattern(config.get("rank_pattern"), module, config.get("r"))
        alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
        if not isinstance(rank, int) or a.shape[0] != rank:
            raise AdapterError(
                f"{module}: weights of rank {a.shape[0]}, but the configuration says {rank}"
            )
        if max_rank and rank > max_rank:
            raise AdapterError(f"{module}: rank {rank} is over adapters.max_rank ({max_rank})")
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise AdapterError(f"{module}: lora_alpha {alpha!r} is not a number")
        scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
        a, b = (half.to(device=device, dtype=dtype).contiguous() for half in (a, b))
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterError(f"{module}: the weights are not finite in {dtype}")
        adapter[module] = LoraWeights(a, b, scale)
    return adapter


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise AdapterError(f"{folder} has no adapter_config.json", param="path") from error
    except (OSError, ValueError) as error:
        raise AdapterError(f"cannot read {file}: {error}", param="path") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} does not hold a configuration", param="path")
    return config


def _refuse_unsupported(config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"adapters of type {kind!r} are not supported, only LORA")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias={config['bias']!r} is not supported; train with bias='none'")
    start = config.get("init_lora_weights")
    if start not in _KEEPS_BASE:
        raise AdapterError(
            f"init_lora_weights={start!r} changes the base weights and is not supported; convert "
            "the adapter to plain LoRA when saving"
        )
    for name, value in config.items():
        if value and name not in _READ | _HARMLESS:
            raise AdapterError(f"the LoRA setting {name!r} is not supported (it is {value!r})")


def _read_tensors(folder: Path) -> dict[str, dict[str, Tensor]]:
    """module -> {"A": tensor, "B": tensor}."""
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise AdapterError(f"{folder} has no adapter_model.safetensors", param="path")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"cannot read {file}: {error}", param="path") from error
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise AdapterError(f"the adapter holds {key}, which is not a LoRA weight of a linear")
        halves.setdefault(match["module"], {})[match["half"]] = tensor
    if not halves:
        raise AdapterError(f"{file} holds no weights", param="path")
    return halves


def _checked_pair(
    module: str, pair: dict[str, Tensor], shape: LinearShape
) -> tuple[Tensor, Tensor]:
    if len(pair) != 2:
        raise AdapterError(f"{module}: lora_A or lora_B is missing")
    a, b = pair["A"], pair["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise AdapterError(
            f"{module}: lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} do not fit together"
        )
    if (a.shape[1], b.shape[0]) != (shape.inputs, shape.outputs):
        raise AdapterError(
            f"{module}: the adapter is for a layer of {a.shape[1]} inputs and {b.shape[0]} "
            f"outputs, the model's has {shape.inputs} and {shape.outputs}: another base model"
        )
    if not (a.is_floating_point() and b.is_floating_point()):
        raise AdapterError(f"{module}: the weights are of type {a.dtype}, not floating point")
    return a, b


def _check_targets(
    config: dict[str, Any], halves: Mapping[str, object], linears: Mapping[str, LinearShape]
) -> None:
    """Check that the file has weights for exactly the modules that the configuration adapts, and
    that all of them are in the model."""
    strange = sorted(set(halves) - set(linears))
    if strange:
        raise AdapterError(
            f"the adapter changes {strange[0]}, which is no linear layer of this model's decoder"
        )
    expected = {name for name in linears if _is_target(name, config)}
    missing, extra = sorted(expected - set(halves)), sorted(set(halves) - expected)
    if missing:
        raise AdapterError(f"target_modules names {missing[0]}, but the file has no weights for it")
    if extra:
        raise AdapterError(f"the file has weights for {extra[0]}, which target_modules omits")


def _is_target(name: str, config: dict[str, Any]) -> bool:
    """PEFT's rule: a full regular expression, or a list of names and suffixes, minus exclusions."""
    excluded = config.get("exclude_modules")
    if excluded and is_named(name, excluded):
        return False
    targets = config.get("target_modules") or []
    if not is_named(name, targets):
        return False
    layers = config.get("layers_to_transform")
    if isinstance(targets, str) or layers is None or layers == []:
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name)
        if found:
            return int(found[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def is_named(name: str, names: str | Sequence[str]) -> bool:
    """Whether PEFT's `target_modules` with these `names` selects the module `name`."""
    if isinstance(names, str):
        try:
            return re.fullmatch(names, name) is not None
        except re.error as error:
            raise AdapterError(f"{names!r} is no regular expression: {error}") from error
    return any(name == each or name.endswith(f".{each}") for each in names)


def _by_pattern(patterns: dict[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of the module's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
