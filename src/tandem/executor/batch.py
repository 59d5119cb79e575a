"""A lane plan as flattened tensors, built once per iteration with numpy.

Spans are reordered so that rows of one adapter are consecutive (base first) and, within it,
decode rows come first; results go back to plan order through indices kept here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from tandem.core.plan import Draw, Span
from tandem.model.attention.base import BatchLayout, SpanArrays
from tandem.model.lora import Segment


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward pass.

    `spans` are in row order and span s starts at row `first_rows[s]`; `order[s]` is its place in
    the plan. `tokens` and `positions` are int64 [rows] on the device.
    """

    spans: list[Span]
    order: list[int]
    first_rows: list[int]
    tokens: Tensor
    positions: Tensor
    layout: BatchLayout
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """What a span must respect to be computable."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def problem(self, span: Span, adapters: Container[str]) -> str | None:
        """Why this span cannot be computed, if so; `adapters` are those that are loaded."""
        if not span.tokens or span.start < 0:
            return "the span has no tokens"
        if span.adapter is not None and span.adapter not in adapters:
            return f"adapter {span.adapter} is not loaded"
        if len(span.block_tables) != 1:
            return f"{len(span.block_tables)} KV groups were planned, the model has 1"
        if span.end > self.max_model_len:
            return f"position {span.end - 1} is past the model's {self.max_model_len} tokens"
        table = span.block_tables[0]
        if len(table) * self.block_size < span.end:
            return f"{len(table)} blocks do not hold {span.end} tokens"
        if min(table) < 0 or max(table) >= self.num_blocks:
            return "the block table names a block that does not exist"
        named = chain(span.tokens, *map(_named_tokens, span.draws))
        outside = any(not 0 <= token < self.vocab_size for token in named)
        # A target of -1 asks for nothing.
        if outside or any(not -1 <= token < self.vocab_size for token in span.score_targets):
            return f"a token is outside of the vocabulary of {self.vocab_size}"
        if span.score_targets and len(span.tokens) - len(span.score_targets) not in (0, 1):
            return f"{len(span.score_targets)} scores were asked of {len(span.tokens)} tokens"
        return None


def build_batch(
    spans: Sequence[Span], block_size: int, device: torch.device, dtype: torch.dtype
) -> Batch:
    """Flatten `spans`, all of which passed `SpanLimits.problem`."""
    keys = [(span.adapter or "", len(span.tokens) > 1) for span in spans]
    order = sorted(range(len(spans)), key=keys.__getitem__)
    ordered = [spans[i] for i in order]
    if not any(several for _, several in keys):
        return _decodes(ordered, order, block_size, device, dtype)
    starts = np.array([span.start for span in ordered], dtype=np.int64)
    rows = [len(span.tokens) for span in ordered]
    lengths = np.array(rows, dtype=np.int64)
    arrays = SpanArrays(starts, lengths, _tables(ordered, starts + lengths, block_size))
    layout, positions = BatchLayout.build(arrays, block_size, device, dtype)
    tokens = np.array([token for span in ordered for token in span.tokens], dtype=np.int64)
    first_rows = list(accumulate(rows[:-1], initial=0))
    return Batch(
        spans=ordered,
        order=order,
        first_rows=first_rows,
        tokens=torch.from_numpy(tokens).to(device),
        positions=positions,
        layout=layout,
        segments=_segments(ordered, first_rows),
    )


def _decodes(
    spans: list[Span], order: list[int], block_size: int, device: torch.device, dtype: torch.dtype
) -> Batch:
    """`build_batch` of spans of one token each: the usual iteration, with little to compute."""
    starts = [span.start for span in spans]
    tables = [span.block_tables[0] for span in spans]
    slots = [
        table[start // block_size] * block_size + start % block_size
        for start, table in zip(starts, tables, strict=True)
    ]
    width = max([len(table) for table in tables])
    flat: list[int] = []
    for table in tables:
        flat += table
        flat += table[:1] * (width - len(table))
    first_rows = list(range(len(spans)))
    positions = np.array(starts, dtype=np.int64)
    layout = BatchLayout(
        positions,
        np.ones_like(positions),
        np.array(flat, dtype=np.int32).reshape(len(spans), width),
        torch.tensor(slots, dtype=torch.int64, device=device),
        block_size,
        device,
        dtype,
    )
    return Batch(
        spans=spans,
        order=order,
        first_rows=first_rows,
        tokens=torch.tensor([span.tokens[0] for span in spans], dtype=torch.int64, device=device),
        positions=torch.tensor(starts, dtype=torch.int64, device=device),
        layout=layout,
        segments=_segments(spans, first_rows),
    )


def _tables(spans: list[Span], ends: np.ndarray, block_size: int) -> np.ndarray:
    """int32 [spans, width]; blocks past a span's end are its first one, which is masked."""
    used = (-(-ends // block_size)).tolist()
    width = max(used)
    flat: list[int] = []
    for span, count in zip(spans, used, strict=True):
        table = span.block_tables[0]
        flat += table[:count]
        flat += table[:1] * (width - count)
    return np.array(flat, dtype=np.int32).reshape(len(spans), width)


def _segments(spans: list[Span], first_rows: list[int]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    if spans[-1].adapter is None:  # the base's spans come first
        return ()
    for span, first in zip(spans, first_rows, strict=True):
        if span.adapter is None:
            continue
        stop = first + len(span.tokens)
        if segments and segments[-1].key == span.adapter:
            segments[-1] = Segment(span.adapter, segments[-1].start, stop)
        else:
            segments.append(Segment(span.adapter, first, stop))
    return tuple(segments)


def _named_tokens(draw: Draw) -> Iterable[int]:
    return chain(draw.banned, draw.sampling.logit_bias)
