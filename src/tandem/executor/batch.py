"""A lane plan as flat tensors, built on the host once per iteration with numpy.

Spans are reordered: rows of one adapter are consecutive (base first), and within an adapter decode
rows come first. Invariant: `order` maps results back to the order of the plan.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from tandem.core.plan import UNDRAWN, Draw, Span
from tandem.model.attention.base import BatchLayout, SpanArrays
from tandem.model.lora import Segment
from tandem.model.transfer import to_device

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward pass, on the host or on a device."""

    spans: list[Span]  # in row order
    order: list[int]  # `order[s]` is the place of span s in the plan
    first_rows: list[int]  # first row of each span
    tokens: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    layout: BatchLayout
    segments: tuple[Segment, ...]
    drawn: Tensor | None = None  # on the device, in place of `tokens`, which are not known yet

    @property
    def num_rows(self) -> int:
        """Rows of all spans."""
        return self.tokens.numel()

    def on(self, device: torch.device) -> Batch:
        """The same on `device`."""
        if device == self.layout.device:
            return self if self.drawn is None else replace(self, tokens=self.drawn)
        layout = replace(self.layout, slots=to_device(self.layout.slots, device), device=device)
        tokens = self.drawn if self.drawn is not None else to_device(self.tokens, device)
        positions = to_device(self.positions, device)
        return replace(self, tokens=tokens, positions=positions, layout=layout)


@dataclass(frozen=True, slots=True)
class SpanLimits:
    """Limits that a span must respect."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def problem(self, span: Span, adapters: Container[str], *, undrawn: bool = False) -> str | None:
        """Why this span cannot be computed, or None. `adapters` are the loaded ones. `undrawn`: its
        tokens are not known yet."""
        tokens, targets, end = span.tokens, span.score_targets, span.end
        if not tokens or span.start < 0:
            return "the span has no tokens"
        if span.adapter is not None and span.adapter not in adapters:
            return f"adapter {span.adapter} is not loaded"
        if len(span.block_tables) != 1:
            return f"{len(span.block_tables)} KV groups were planned, the model has 1"
        if end > self.max_model_len:
            return f"position {end - 1} is past the model's {self.max_model_len} tokens"
        table = span.block_tables[0]
        if len(table) * self.block_size < end:
            return f"{len(table)} blocks do not hold {end} tokens"
        if min(table) < 0 or max(table) >= self.num_blocks:
            return "the block table names a block that does not exist"
        # Few spans have targets (-1: not scored) or draws that name tokens.
        named = [draw for draw in span.draws if draw.banned or draw.sampling.logit_bias]
        if (
            self._outside(tokens, UNDRAWN if undrawn else 0)
            or (targets and self._outside(targets, -1))
            or (named and any(self._outside(_named_tokens(draw), 0) for draw in named))
        ):
            return f"a token is outside of the vocabulary of {self.vocab_size}"
        if targets and len(tokens) - len(targets) not in (0, 1):
            return f"{len(targets)} scores were asked of {len(tokens)} tokens"
        return None

    def _outside(self, tokens: Sequence[int], least: int) -> bool:
        """Whether a token is below `least` or no token of the vocabulary."""
        return bool(tokens) and (min(tokens) < least or max(tokens) >= self.vocab_size)


def build_batch(spans: Sequence[Span], block_size: int, dtype: torch.dtype) -> Batch:
    """Flatten `spans`, all of which passed `SpanLimits.problem`. The result is on the host."""
    keys = [(span.adapter or "", len(span.tokens) > 1) for span in spans]
    order = sorted(range(len(spans)), key=keys.__getitem__)
    ordered = [spans[i] for i in order]
    if not any(several for _, several in keys):
        return _decodes(ordered, order, block_size, dtype)
    starts = np.array([span.start for span in ordered], dtype=np.int64)
    rows = [len(span.tokens) for span in ordered]
    lengths = np.array(rows, dtype=np.int64)
    arrays = SpanArrays(starts, lengths, _tables(ordered, starts + lengths, block_size))
    layout, positions = BatchLayout.build(arrays, block_size, _HOST, dtype)
    tokens = np.array([token for span in ordered for token in span.tokens], dtype=np.int64)
    first_rows = list(accumulate(rows[:-1], initial=0))
    return Batch(
        spans=ordered,
        order=order,
        first_rows=first_rows,
        tokens=torch.from_numpy(tokens),
        positions=positions,
        layout=layout,
        segments=_segments(ordered, first_rows),
    )


def _decodes(spans: list[Span], order: list[int], block_size: int, dtype: torch.dtype) -> Batch:
    """`build_batch` for spans of one token each: the usual iteration, with little to compute."""
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
        torch.tensor(slots, dtype=torch.int64),
        block_size,
        _HOST,
        dtype,
    )
    return Batch(
        spans=spans,
        order=order,
        first_rows=first_rows,
        tokens=torch.tensor([span.tokens[0] for span in spans], dtype=torch.int64),
        positions=torch.from_numpy(positions),
        layout=layout,
        segments=_segments(spans, first_rows),
    )


def _tables(spans: list[Span], ends: np.ndarray, block_size: int) -> np.ndarray:
    """int32 [spans, width]. Entries past a span's end repeat its first block; they are masked."""
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
    if spans[-1].adapter is None:  # the base's spans come first, so there are no others
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


def _named_tokens(draw: Draw) -> tuple[int, ...]:
    return (*draw.banned, *draw.sampling.logit_bias)
