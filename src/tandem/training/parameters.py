"""The parameters of one adapter in one flat float32 tensor, and where each matrix lies in it.

Clipping, the optimiser and a snapshot are then one operation each, whatever the number of layers.
Knows no model: a module is a name and the widths of its linear layer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# (a [rank, in], b [out, rank]) of one module.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LoraShape:
    """One module's update: out += (x @ a.T @ b.T) * scale."""

    rank: int
    inputs: int
    outputs: int
    scale: float

    @property
    def size(self) -> int:
        """Numbers in both halves."""
        return self.rank * (self.inputs + self.outputs)


class ParameterLayout:
    """Which part of a flat tensor belongs to which module."""

    def __init__(self, modules: Mapping[str, LoraShape]) -> None:
        self.modules = dict(modules)
        self._starts: dict[str, int] = {}
        self.size = 0
        for name, shape in self.modules.items():
            self._starts[name] = self.size
            self.size += shape.size

    def pair(self, flat: Tensor, module: str) -> Pair:
        """Views of `flat` [size] that are the module's two halves."""
        shape, start = self.modules[module], self._starts[module]
        middle, end = start + shape.rank * shape.inputs, start + shape.size
        return (
            flat[start:middle].view(shape.rank, shape.inputs),
            flat[middle:end].view(shape.outputs, shape.rank),
        )

    def pairs(self, flat: Tensor) -> dict[str, Pair]:
        """Views of `flat` by module."""
        return {module: self.pair(flat, module) for module in self.modules}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat` by PEFT's names in `adapter_model.safetensors`."""
        found: dict[str, Tensor] = {}
        for module, (a, b) in self.pairs(flat).items():
            found[f"base_model.model.{module}.lora_A.weight"] = a
            found[f"base_model.model.{module}.lora_B.weight"] = b
        return found

    def flatten(self, pairs: Mapping[str, Pair], device: torch.device) -> Tensor:
        """The flat float32 tensor that holds `pairs`."""
        flat = torch.empty(self.size, device=device)
        for module, halves in self.pairs(flat).items():
            for half, given in zip(halves, pairs[module], strict=True):
                half.copy_(given)
        return flat

    def fresh(self, seed: int, device: torch.device) -> Tensor:
        """Start values as PEFT's: A uniform as `nn.Linear`'s weight, B zero.

        Each module's depend on `seed` and its name alone.
        """
        flat = torch.zeros(self.size)
        for module, (a, _) in self.pairs(flat).items():
            digest = hashlib.sha256(f"{seed}/{module}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            bound = 1 / math.sqrt(self.modules[module].inputs)
            a.uniform_(-bound, bound, generator=generator)
        return flat.to(device)
