"""How the Triton kernel's rows are cut: a tile is a few rows of one span, for one program.

Knows no device and no kernel. Invariant: every row of a batch is in one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Lines of a tile, each a row of one query head, at least what the matrix units take; and of a
# prompt's tile where the rows have fewer.
_LEAST_LINES, _PROMPT_LINES = 16, 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of at most `rows` rows each. `table` int32 [tiles, 4] are the first row in the batch,
    the rows, the first row's position and the span."""

    rows: int
    table: np.ndarray


def cut(starts: np.ndarray, lengths: np.ndarray, heads: int) -> list[Tiles]:
    """Tiles of spans of `lengths` rows from positions `starts` on, int64 [spans] each, where so
    many query heads share a tile: decodes in tiles of few rows, everything else in larger ones; the
    longest begin first."""
    first_rows = np.cumsum(lengths) - lengths
    found = []
    for single, lines in ((True, _LEAST_LINES), (False, _PROMPT_LINES)):
        spans = np.flatnonzero((lengths == 1) == single)
        if not spans.size:
            continue
        rows = max(1, lines // heads)
        counts = -(-lengths[spans] // rows)
        owner = np.repeat(spans, counts)
        within = (np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
        left = np.minimum(rows, lengths[owner] - within)
        position = starts[owner] + within
        table = np.stack([first_rows[owner] + within, left, position, owner], axis=1)
        found.append(Tiles(rows, table[np.argsort(-position, kind="stable")].astype(np.int32)))
    return found
