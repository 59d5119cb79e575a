"""AdamW with clipping and a schedule over one flat parameter; the formulas of torch and
transformers. Knows no layers. Invariant: an update that is not finite changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.core.errors import AdapterError
from tandem.core.training import OptimizerSpec, Schedule

# torch's `clip_grad_norm_` divides by the norm plus this.
_CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class AdamState:
    """What AdamW remembers of `steps` updates: float32 tensors shaped as the parameter."""

    steps: int
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of a step: `grad_norm` before clipping; `applied` False if it was not finite."""

    applied: bool
    grad_norm: float
    learning_rate: float


class Optimizer:
    """AdamW of `parameter`, a flat float32 tensor that it writes in place."""

    def __init__(
        self, parameter: Tensor, spec: OptimizerSpec, state: AdamState | None = None
    ) -> None:
        """Goes on from `state` if given. Raises `AdapterError` for settings that make no sense."""
        _check(spec)
        self._spec = spec
        self._parameter = parameter
        self._adam = torch.optim.AdamW(
            [parameter],
            lr=spec.learning_rate,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            fused=True,
        )
        if state is not None:
            self._adam.state[parameter] = {
                "step": torch.tensor(float(state.steps), device=parameter.device),
                "exp_avg": state.exp_avg.clone(),
                "exp_avg_sq": state.exp_avg_sq.clone(),
            }

    def step(self, gradient: Tensor, done: int, scale: float = 1.0) -> Applied:
        """One update after `done` others at `scale` times the rate; `gradient` [size] is float32
        and may be changed."""
        rate = scale * self._spec.learning_rate * learning_rate_factor(self._spec, done)
        norm = float(torch.linalg.vector_norm(gradient))
        if not math.isfinite(norm):
            return Applied(False, norm, rate)
        limit = self._spec.max_grad_norm
        if limit and norm + _CLIP_EPS > limit:
            gradient.mul_(limit / (norm + _CLIP_EPS))
        self._adam.param_groups[0]["lr"] = rate
        self._parameter.grad = gradient
        self._adam.step()
        self._parameter.grad = None
        return Applied(True, norm, rate)

    def state(self) -> AdamState:
        """A copy of what AdamW remembers; zeros before the first update."""
        known = self._adam.state.get(self._parameter)
        if not known:
            zeros = torch.zeros_like(self._parameter)
            return AdamState(0, zeros, zeros.clone())
        return AdamState(int(known["step"]), known["exp_avg"].clone(), known["exp_avg_sq"].clone())

    @property
    def nbytes(self) -> int:
        """Memory of what AdamW remembers."""
        return 2 * self._parameter.nbytes if self._adam.state.get(self._parameter) else 0


def learning_rate_factor(spec: OptimizerSpec, done: int) -> float:
    """Share of the learning rate for the update after `done` others.

    As transformers' `get_scheduler` of the same name; the first update of a warm-up has rate 0.
    """
    if done < spec.warmup_steps:
        return done / spec.warmup_steps
    if spec.schedule is Schedule.CONSTANT:
        return 1.0
    decay_steps = max(1, spec.total_steps - spec.warmup_steps)
    progress = (done - spec.warmup_steps) / decay_steps
    if spec.schedule is Schedule.LINEAR:
        return max(0.0, 1.0 - progress)
    # transformers' cosine rises again after its end; a rate that has reached zero stays there.
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def _check(spec: OptimizerSpec) -> None:
    if spec.schedule is not Schedule.CONSTANT and spec.total_steps <= spec.warmup_steps:
        raise AdapterError(
            f"a {spec.schedule} schedule needs total_steps beyond its warmup_steps",
            param="total_steps",
        )
    for name in ("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"):
        value = {
            "learning_rate": spec.learning_rate,
            "weight_decay": spec.weight_decay,
            "max_grad_norm": spec.max_grad_norm,
            "warmup_steps": spec.warmup_steps,
        }[name]
        if not math.isfinite(value) or value < 0:
            raise AdapterError(f"{name} is {value}; it must be a number from 0 on", param=name)
    for name, beta in (("beta1", spec.beta1), ("beta2", spec.beta2)):
        if not 0.0 <= beta < 1.0:
            raise AdapterError(f"{name} is {beta}; it must be in [0, 1)", param=name)
    if not spec.eps > 0.0:
        raise AdapterError(f"eps is {spec.eps}; it must be over 0", param="eps")
