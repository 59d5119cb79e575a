"""From hidden states to logits, on chosen rows only.

Repeats what each architecture does after its `lm_head` (scaling, soft cap), because its own
forward would need the whole model; the self-test at load compares both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True)
class Head:
    """`lm_head` and the arithmetic behind it: logits = cap(lm_head(h) * factor / divisor)."""

    linear: nn.Module
    factor: float = 1.0
    divisor: float = 1.0
    softcap: float = 0.0

    @staticmethod
    def of(linear: nn.Module, config: dict[str, Any]) -> Head:
        """Read Cohere's `logit_scale`, Granite's `logits_scaling`, Gemma's soft cap."""
        return Head(
            linear,
            factor=float(config.get("logit_scale") or 1.0),
            divisor=float(config.get("logits_scaling") or 1.0),
            softcap=float(config.get("final_logit_softcapping") or 0.0),
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocab] of `hidden` [rows, width], in the model's dtype."""
        logits: Tensor = self.linear(hidden)
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
