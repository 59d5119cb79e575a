"""How rows are divided for the Triton kernel: a tile is a few rows of one span, for one program.

Knows no device and no kernel. Invariant: every row of a batch is in one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Lines of a tile (a line is a row of one query head): the least that matrix units take, and the
# number for a prompt's tile.
_LEAST_LINES, _PROMPT_LINES = 16, 64


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of at most `rows` rows each. `table` int32 [tiles, 4] has the first row in the batch,
    the number of rows, the position of the first row, and the span."""

    rows: int
    table: np.ndarray


def cut(starts: np.ndarray, lengths: np.ndarray, heads: int) -> list[Tiles]:
    """Tiles of spans with `lengths` rows from positions `starts` on, int64 [spans] each. `heads`
    query heads share a tile. Decodes get tiles of few rows, other spans larger ones. The tiles with
    the longest context come first."""
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
