"""A trainer: the working parameters of one adapter, their gradient and their optimiser.

Masters and gradients are float32; what forward passes read is a copy, made anew after each update.
Knows no layers and no recordings. Invariant: the revision counts the updates that were applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.training import TrainerSpec, TrainerState
from tandem.training.checkpoint import Checkpoint
from tandem.training.layerwise import Gradients
from tandem.training.optimizer import AdamState, Applied, Optimizer
from tandem.training.parameters import Pair, ParameterLayout


@dataclass(frozen=True, slots=True)
class Start:
    """Where a trainer starts: parameters, and for one that goes on its optimiser's memory.

    The schedule begins at the revision `schedule_from`.
    `targets` are the modules of `layout` in the short form that PEFT's `target_modules` has.
    """

    layout: ParameterLayout
    targets: tuple[str, ...]
    parameters: Tensor
    revision: int = 0
    adam: AdamState | None = None
    schedule_from: int = 0


class Trainer:
    """See the module's description."""

    def __init__(self, spec: TrainerSpec, start: Start, base_model: str) -> None:
        """Takes over `start.parameters`, flat float32. Raises `AdapterError` for bad settings."""
        self.spec = spec
        self.layout = start.layout
        self.revision = start.revision
        self._schedule_from = start.schedule_from
        self._targets = start.targets
        self._base_model = base_model
        self._parameters = start.parameters
        self._gradient: Tensor | None = None
        self._optimizer = Optimizer(self._parameters, spec.optimizer, start.adam)

    @property
    def state(self) -> TrainerState:
        """For those who asked to open it."""
        return TrainerState(self.spec.name, self.revision, self.layout.size)

    @property
    def nbytes(self) -> int:
        """Memory of parameters, gradient and optimiser."""
        gradient = self._gradient.nbytes if self._gradient is not None else 0
        return self._parameters.nbytes + gradient + self._optimizer.nbytes

    def working_copy(self, dtype: torch.dtype) -> dict[str, Pair]:
        """The parameters in `dtype` by module: new tensors, leaves that require gradients."""
        flat = self._parameters.to(dtype, copy=True)
        pairs = self.layout.pairs(flat)
        return {name: (a.requires_grad_(), b.requires_grad_()) for name, (a, b) in pairs.items()}

    def accumulate(self, found: Gradients) -> None:
        """Add gradients by module to those since the last update."""
        if self._gradient is None:
            self._gradient = torch.zeros_like(self._parameters)
        totals: list[Tensor] = []
        parts: list[Tensor] = []
        for module, halves in found.items():
            for total, half in zip(self.layout.pair(self._gradient, module), halves, strict=True):
                if half is not None:
                    totals.append(total)
                    parts.append(half)
        if totals:  # one launch for many matrices where both are float32 and dense
            torch._foreach_add_(totals, parts)

    def drop_gradients(self) -> None:
        """Forget what was accumulated since the last update."""
        self._gradient = None

    def gradients(self) -> Mapping[str, Pair]:
        """What was accumulated since the last update, by module; views."""
        if self._gradient is None:
            return {}
        return self.layout.pairs(self._gradient)

    def update(self, scale: float = 1.0) -> Applied:
        """Optimiser step with what was accumulated, which is used up either way; `scale` multiplies
        the learning rate."""
        gradient = self._gradient
        if gradient is None:
            gradient = torch.zeros_like(self._parameters)
        self._gradient = None
        applied = self._optimizer.step(gradient, self.revision - self._schedule_from, scale)
        if applied.applied:
            self.revision += 1
        return applied

    def snapshot(self) -> Checkpoint:
        """A copy that later updates do not touch."""
        return Checkpoint(
            self.spec,
            self.state,
            self._base_model,
            self._targets,
            self.layout,
            self._parameters.clone(),
            self._optimizer.state(),
            self._schedule_from,
        )
