"""Compares the served path with the model's own forward on a short random text.

The text is computed in chunks beside another sequence, over scattered paged KV, by the kernel and
the modules that will serve. Invariant: a model that passes differs from its own forward by rounding
only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tandem.core.errors import UnsupportedModel
from tandem.model.attention.base import (
    AttentionKernel,
    BatchLayout,
    LayerKV,
    LayerShape,
    PagedContext,
    SpanArrays,
)
from tandem.model.head import Head

_PROBE_TOKENS = 56
_CUT = 40  # with the neighbour, more rows than a block of the matrix kernels
_NEIGHBOUR_TOKENS = 5
_BLOCK = 8
# Relative L2 distance of logits. A structural difference would be around 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_HALF = 0.2


class SelfTest:
    """Compares the served path with the model's own forward, after all changes of the model."""

    def __init__(self, name: str, model: nn.Module, vocab_size: int, limit_tokens: int) -> None:
        """`model` still computes eagerly, as transformers made it. Its logits are the reference."""
        self._name = name
        self.device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        generator = torch.Generator().manual_seed(20)
        self._tokens = torch.randint(
            0, vocab_size, (min(_PROBE_TOKENS, limit_tokens),), generator=generator
        ).to(self.device)
        try:
            with torch.no_grad():
                logits = model(input_ids=self._tokens[None], use_cache=False).logits[0]
        except (RuntimeError, ValueError, TypeError) as error:
            raise UnsupportedModel(f"{name} fails in its own forward pass: {error}") from error
        self._expected: Tensor = logits

    def check(
        self,
        backbone: nn.Module,
        head: Head,
        shapes: tuple[LayerShape, ...],
        kernel: AttentionKernel,
    ) -> None:
        """Raise `UnsupportedModel` if the logits differ by more than rounding."""
        layers = [self._storage(shape) for shape in shapes]
        # The text's blocks are scattered. Block 3 belongs to the neighbour, the sequence beside it.
        tables = np.array([[5, 2, 6, 0, 4, 7, 1], [3] * 7], dtype=np.int32)
        length = len(self._tokens)
        cut = min(_CUT, length - 1)
        beside = min(_NEIGHBOUR_TOKENS, cut)
        chunks = [([0, 0], [cut, beside]), ([cut, beside], [length - cut, 1])]
        found = []
        try:
            for starts, lengths in chunks:
                spans = SpanArrays(np.array(starts), np.array(lengths), tables)
                layout, positions = BatchLayout.build(spans, _BLOCK, self.device, self._dtype)
                context = PagedContext(kernel.prepare(layout), layers)
                with torch.no_grad():
                    hidden = backbone(
                        input_ids=self._chunk(starts, lengths)[None],
                        position_ids=positions[None],
                        use_cache=False,
                        attention_context=context,
                    ).last_hidden_state[0]
                    found.append(head(hidden[: lengths[0]]))
        except (RuntimeError, ValueError, TypeError) as error:
            raise UnsupportedModel(
                f"{self._name} cannot run over a paged KV cache: {error}"
            ) from error
        self._compare(torch.cat(found))

    def _chunk(self, starts: list[int], lengths: list[int]) -> Tensor:
        """Tokens of the text, then of the neighbour, which has the text backwards."""
        texts = (self._tokens, self._tokens.flip(0))
        parts = zip(texts, starts, lengths, strict=True)
        return torch.cat([text[start : start + length] for text, start, length in parts])

    def _storage(self, shape: LayerShape) -> LayerKV:
        size = (8, _BLOCK, shape.kv_heads, shape.head_dim)
        keys, values = (torch.zeros(size, dtype=self._dtype, device=self.device) for _ in range(2))
        return LayerKV(keys, values)

    def _compare(self, found: Tensor) -> None:
        expected = self._expected.double()
        distance = float((found.double() - expected).norm() / expected.norm().clamp(min=1e-9))
        limit = _TOLERANCE.get(self._dtype, _TOLERANCE_HALF)
        if not distance <= limit:
            raise UnsupportedModel(
                f"{self._name}: computed in chunks, its logits differ from its own forward by "
                f"{distance:.2g} (relative; {limit:g} is allowed in {self._dtype})"
            )
