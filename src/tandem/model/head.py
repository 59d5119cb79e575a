"""From hidden states to logits, for selected rows only.

Repeats what each architecture does after its `lm_head` (scaling, soft cap), since the
architecture's own forward would compute the whole model. The self-test at load compares both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tandem.model.kernels.score import score_rows
from tandem.model.linear import AmxWeight, PackedLinear

# Inputs of an AMX weight are a multiple of this.
_SIDE = 32
# Bytes of float32 logits that are computed at once: on an accelerator enough rows for its matrix
# units (551 of 152,000 logits); on a CPU as much as the allocator can reuse without clearing new
# pages.
_LOGIT_BYTES, _CPU_LOGIT_BYTES = 320 << 20, 16 << 20
# Rows at once if no logits are kept; 40 MiB for a width of 1,024.
_KERNEL_ROWS = 2048


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

        With `gradient` also d(log-probability)/d(hidden) [rows, width], in the model's dtype. Call
        it with at most `rows_at_once` rows, so that memory is bounded.
        """
        if (packed := self._packed()) is not None:
            linear, weights = packed
            back = linear.backward_weights() if gradient else None
            assert back is None or isinstance(back, AmxWeight)
            return score_rows(
                hidden.detach().contiguous(),
                targets,
                weights.panels,
                linear.out_features,
                back.panels if back is not None else None,
            )
        with torch.set_grad_enabled(gradient):
            leaf = hidden.detach().requires_grad_(gradient)
            raw: Tensor = self.linear(leaf)
        with torch.no_grad():
            logits = self._shaped(raw.detach())
            scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
            bend = 1.0 - (scores / self.softcap).square() if gradient and self.softcap else None
            chosen = targets[:, None]
            # All in place: `logsumexp` would need a second copy of the logits.
            wanted, peak = scores.gather(1, chosen), scores.amax(dim=-1, keepdim=True)
            total = scores.sub_(peak).exp_().sum(dim=-1, keepdim=True)
            logprobs = (wanted - peak - total.log())[:, 0]
            if not gradient:
                return logprobs, None
            # d(log p)/d(logits) = onehot - softmax, then back through what follows `lm_head`.
            slope = scores.div_(total.neg_())
            slope.scatter_add_(1, chosen, torch.ones_like(slope[:, :1]))
            if bend is not None:
                slope.mul_(bend)
            if self.factor != self.divisor:
                slope.mul_(self.factor / self.divisor)
        (rows,) = torch.autograd.grad(raw, leaf, slope.to(raw.dtype))
        return logprobs, rows

    def rows_at_once(self, device: torch.device) -> int:
        """Most rows for one call of `score` on `device`, so that logits or sums are bounded."""
        if self._packed() is not None:
            return _KERNEL_ROWS
        return self.logits_at_once(device)

    def logits_at_once(self, device: torch.device) -> int:
        """Rows whose float32 logits take 320 MiB, or 16 MiB on a CPU."""
        vocab: Any = self.linear.out_features
        most = _CPU_LOGIT_BYTES if device.type == "cpu" else _LOGIT_BYTES
        return max(1, most // (4 * vocab))

    def _packed(self) -> tuple[PackedLinear, AmxWeight] | None:
        """The layer and weights for the scoring kernel, if it can compute this head: packed in both
        directions, without scaling or cap."""
        linear = self.linear
        if self.softcap or not self.factor == self.divisor == 1.0:
            return None
        if not isinstance(linear, PackedLinear) or not isinstance(linear.weights, AmxWeight):
            return None
        # The transposed weight has the vocabulary as its inputs.
        return (linear, linear.weights) if linear.out_features % _SIDE == 0 else None

    def _shaped(self, logits: Tensor) -> Tensor:
        """What each architecture does after `lm_head`."""
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits
