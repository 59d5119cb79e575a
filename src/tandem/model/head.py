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
        return self._shaped(logits)

    def score(
        self, hidden: Tensor, targets: Tensor, *, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities [rows], float32, of `targets` int64 [rows] under `hidden`.

        With `gradient` also d(log-probability)/d(hidden) [rows, width], in the model's dtype.
        Not for more rows at once than the caller has memory for: some float32 [rows, vocab].
        """
        with torch.set_grad_enabled(gradient):
            leaf = hidden.detach().requires_grad_(gradient)
            raw: Tensor = self.linear(leaf)
        with torch.no_grad():
            logits = self._shaped(raw.detach())
            scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total = scores.logsumexp(dim=-1, keepdim=True)
            chosen = targets[:, None]
            logprobs = (scores.gather(1, chosen) - total)[:, 0]
            if not gradient:
                return logprobs, None
            bend = 1.0 - (scores / self.softcap).square() if self.softcap else None
            # d(log p)/d(logits) = onehot - softmax, then back through what follows `lm_head`.
            slope = scores.sub_(total).exp_().neg_()
            slope.scatter_add_(1, chosen, torch.ones_like(slope[:, :1]))
            if bend is not None:
                slope.mul_(bend)
            if self.factor != self.divisor:
                slope.mul_(self.factor / self.divisor)
        (rows,) = torch.autograd.grad(raw, leaf, slope.to(raw.dtype))
        return logprobs, rows

    def _shaped(self, logits: Tensor) -> Tensor:
        """What each architecture does after `lm_head`."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
