"""Attention over whole sequences without a cache, differentiable in queries, keys and values.

Used to recompute recorded layers. Rows of all sequences are consecutive, and each sequence attends
only to itself. Keys and values of all its tokens, the prompt's too, have gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.model.attention.base import AttentionParams
from tandem.model.attention.sdpa import dot_product
from tandem.model.transfer import to_device

# If (tokens of a sequence) x (head size) is at most this, torch's backward of attention on a CPU is
# slower in bfloat16 than in float32: 3.3 times at 190 x 32, equal at 256 x 64.
_SMALL_FOR_BFLOAT16 = 12288


class DenseContext:
    """An `AttentionContext`: sequence s has the next `lengths[s]` rows, from position 0 on.

    Empty sequences are left out. Neighbouring sequences of equal length share one call.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(length for length in lengths if length)
        self._runs: list[tuple[int, int]] = []
        for length in lengths:
            if length and self._runs and self._runs[-1][1] == length:
                self._runs[-1] = (self._runs[-1][0] + 1, length)
            elif length:
                self._runs.append((1, length))
        self._biases: dict[tuple[int, int], Tensor] = {}
        self._bounds: Tensor | None = None

    def bounds(self, device: torch.device) -> Tensor:
        """int32 [sequences + 1] on `device`: the first row of each, and the end."""
        if self._bounds is None:
            ends = torch.tensor((0, *self.lengths)).cumsum(0, dtype=torch.int32)
            self._bounds = to_device(ends, device)
        return self._bounds

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """Attention of each sequence to itself."""
        sizes = [count * length for count, length in self._runs]
        tensors = (query.split(sizes), key.split(sizes), value.split(sizes))
        mixed = []
        for run, q, k, v in zip(self._runs, *tensors, strict=True):
            rows = (_by_sequence(q, *run), _by_sequence(k, *run), _by_sequence(v, *run))
            mixed.append(self._attend_run(*rows, params))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend_run(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """[count, heads, length, d] each -> [count * length, heads, d]."""
        length, dtype = query.shape[2], query.dtype
        small = length * query.shape[3] <= _SMALL_FOR_BFLOAT16
        if small and dtype == torch.bfloat16 and query.device.type == "cpu":
            query, key, value = query.float(), key.float(), value.float()
        bias = self._bias(length, params.window, query) if 0 < params.window < length else None
        mixed = dot_product(query, key, value, bias, params)
        return mixed.transpose(1, 2).flatten(0, 1).to(dtype)

    def _bias(self, length: int, window: int, like: Tensor) -> Tensor:
        """[1, 1, length, length]: 0 where a row sees a key, else minus infinity."""
        known = self._biases.get((length, window))
        if known is None:
            ones = torch.ones(length, length, dtype=torch.bool, device=like.device)
            seen = ones.tril().triu(1 - window)
            known = torch.zeros(length, length, dtype=like.dtype, device=like.device)
            known = known.masked_fill_(~seen, -torch.inf)[None, None]
            self._biases[length, window] = known
        return known


def _by_sequence(rows: Tensor, count: int, length: int) -> Tensor:
    """[count * length, heads, d] -> [count, heads, length, d]."""
    return rows.unflatten(0, (count, length)).transpose(1, 2)
