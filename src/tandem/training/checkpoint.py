"""A trainer's snapshot and its files: PEFT's, the optimiser's memory and a description.

Files are written beside their final place and renamed when all of them are on the disk; nothing
is pickled. Knows no model. Invariant: a directory that exists under its final name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.core.errors import AdapterError, DiskError
from tandem.core.training import TrainerSpec, TrainerState
from tandem.training.optimizer import AdamState
from tandem.training.parameters import ParameterLayout

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """See `tandem.core.ports.TrainerSnapshot`; its tensors are nobody else's."""

    spec: TrainerSpec
    state: TrainerState
    base_model: str
    targets: tuple[str, ...]
    layout: ParameterLayout
    parameters: Tensor
    adam: AdamState
    schedule_from: int = 0

    def write(self, path: str) -> None:
        """Write the new directory `path`. Raises `AdapterError`, or `DiskError` if the disk does
        not take it; then it does not exist."""
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        if target.exists():
            raise AdapterError(f"{target} exists already", param="path")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            self._write_files(partial)
            _sync(partial)
            partial.rename(target)
            _sync(target.parent)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise DiskError(f"cannot write the adapter to {target}: {error}") from error

    def _write_files(self, folder: Path) -> None:
        self._write_tensors(folder / WEIGHTS, self.layout.named(self.parameters))
        memory = {
            f"{kind}/{name}": tensor
            for kind, flat in (("exp_avg", self.adam.exp_avg), ("exp_avg_sq", self.adam.exp_avg_sq))
            for name, tensor in self.layout.named(flat).items()
        }
        self._write_tensors(folder / OPTIMIZER, memory)
        _write_text(folder / CONFIG, self._peft_config())
        state = {
            "revision": self.state.revision,
            "optimizer_steps": self.adam.steps,
            "schedule_from": self.schedule_from,
            "lora": asdict(self.spec.lora),
            "optimizer": asdict(self.spec.optimizer),
        }
        _write_text(folder / STATE, state)

    def _peft_config(self) -> dict[str, Any]:
        """`adapter_config.json`: the most frequent shape, and patterns for modules that differ."""
        modules = self.layout.modules
        rank = Counter(shape.rank for shape in modules.values()).most_common(1)[0][0]
        alphas = {name: _whole(shape.scale * shape.rank) for name, shape in modules.items()}
        alpha = Counter(alphas.values()).most_common(1)[0][0]
        ranks = {name: shape.rank for name, shape in modules.items()}
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_model,
            "inference_mode": True,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": False,
            "target_modules": list(self.targets),
            "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
            "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        }

    @staticmethod
    def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
        # safetensors refuses tensors that share memory, as views of one flat tensor do.
        own = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        save_file(own, file, metadata={"format": "pt"})
        _sync(file)


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """What a checkpoint knows beyond the adapter: the trainer's revision, AdamW's memory, and at
    which revision the schedule began."""

    revision: int
    adam: AdamState
    schedule_from: int = 0


def read_optimizer(
    path: str, layout: ParameterLayout, device: torch.device
) -> SavedOptimizer | None:
    """The optimiser's state of the checkpoint at `path`, or None if it has none.

    Raises `AdapterError` when it is damaged or belongs to other parameters.
    """
    file, description = Path(path) / OPTIMIZER, Path(path) / STATE
    if not file.is_file() and not description.is_file():
        return None
    try:
        state = json.loads(description.read_text(encoding="utf-8"))
        tensors = load_file(file)
        revision, steps = int(state["revision"]), int(state["optimizer_steps"])
        schedule_from = int(state.get("schedule_from", 0))  # older checkpoints have none
        flats = [_gather(tensors, kind, layout) for kind in ("exp_avg", "exp_avg_sq")]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise AdapterError(f"cannot read the optimiser's state at {path}: {error}") from error
    average, square = (flat.to(device) for flat in flats)
    return SavedOptimizer(revision, AdamState(steps, average, square), schedule_from)


def _gather(tensors: dict[str, Tensor], kind: str, layout: ParameterLayout) -> Tensor:
    flat = torch.empty(layout.size)
    for name, part in layout.named(flat).items():
        found = tensors[f"{kind}/{name}"]
        if found.shape != part.shape or not found.isfinite().all():
            raise ValueError(f"{kind} of {name} does not fit")
        part.copy_(found)
    return flat


def _whole(number: float) -> float | int:
    return round(number) if abs(number - round(number)) < 1e-9 * max(1.0, abs(number)) else number


def _write_text(file: Path, content: dict[str, Any]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(path: Path) -> None:
    """Have the system write a file, or a directory's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
