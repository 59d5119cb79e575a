"""The tables of a batch in one buffer, so that one copy brings all of them to the device.

Sections are aligned, and block tables come last: a copy ends with the last span in use. Knows no
kernel. Invariant: a slot or tile that is not in use says so (-1, and no rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.model.attention.base import BatchLayout, SpanArrays
from tandem.model.attention.tiles import COLUMNS, decode_tiles, prompt_tiles

# What a kernel may assume of a section's address.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Tables:
    """Views of a buffer: `slots` int64 [rows], tiles int32 [tiles, COLUMNS], `blocks` int32 [spans,
    width]."""

    slots: Tensor
    decodes: Tensor
    prompts: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many rows, spans, blocks a span (`width`) and tiles there may be."""

    rows: int
    spans: int
    width: int
    decodes: int
    prompts: int

    @staticmethod
    def reserved(rows: int, spans: int, width: int, processors: int) -> Capacity:
        """For any batch of at most `rows` rows in `spans` spans; only decodes if both are equal."""
        prompts = prompt_tiles(rows, spans) if rows > spans else 0
        return Capacity(rows, spans, width, decode_tiles(spans, processors), prompts)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.used(self.spans)

    def used(self, spans: int) -> int:
        """Bytes up to the block table of the last of `spans` spans."""
        return self._starts()[3] + 4 * spans * self.width

    def views(self, buffer: Tensor) -> Tables:
        """The sections of `buffer`, uint8 [nbytes]."""
        slots, decodes, prompts, blocks = self._starts()

        def tiles(start: int, count: int) -> Tensor:
            part = buffer[start : start + 4 * COLUMNS * count]
            return part.view(torch.int32).view(count, COLUMNS)

        return Tables(
            buffer[slots : slots + 8 * self.rows].view(torch.int64),
            tiles(decodes, self.decodes),
            tiles(prompts, self.prompts),
            buffer[blocks : self.nbytes].view(torch.int32).view(self.spans, self.width),
        )

    def _starts(self) -> tuple[int, ...]:
        sizes = [8 * self.rows, 4 * COLUMNS * self.decodes, 4 * COLUMNS * self.prompts]
        aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        return (0, *np.cumsum(aligned).tolist())


def needed(layout: BatchLayout, decodes: int, prompts: int) -> Capacity:
    """The capacity that is just enough for `layout`, cut into this many tiles."""
    spans, width = layout.tables.shape
    return Capacity(int(layout.lengths.sum()), spans, width, decodes, prompts)


def write(host: Tables, layout: BatchLayout, decodes: np.ndarray, prompts: np.ndarray) -> None:
    """Write `layout` and its tiles into views of a buffer on the host."""
    spans, width = layout.tables.shape
    slots = SpanArrays(layout.starts, layout.lengths, layout.tables).slots(layout.block_size)
    into = host.slots.numpy()
    into[: slots.size], into[slots.size :] = slots, -1
    for tiles, found in ((host.decodes.numpy(), decodes), (host.prompts.numpy(), prompts)):
        tiles[: len(found)] = found
        tiles[len(found) :, 1] = 0
    host.blocks.numpy()[:spans, :width] = layout.tables
