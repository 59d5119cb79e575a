"""How rows are divided for the Triton kernel: a tile is a few rows of one span.

A decode is a tile of its own. Its keys are divided among several programs (flash-decoding, arXiv
2311.01282) where the batch alone does not fill the device. Knows no model. Invariants: every row of
a batch is in one tile (or in one for each part of its keys), and the number of tiles has a bound
that depends on the batch's size alone.
"""

from __future__ import annotations

import numpy as np

# Rows of a prompt's tile, and the least keys that a program of its own is worth.
PROMPT_ROWS, LEAST_SHARE = 64, 64
# Columns of a table: first row in the batch, number of rows, position of the first row, span, which
# part of the keys, of how many.
COLUMNS = 6
_NO_TILES = np.empty((0, COLUMNS), dtype=np.int32)


def decode_tiles(spans: int, processors: int) -> int:
    """The most tiles of up to `spans` spans of one row."""
    return max(spans + max(processors // 4, 1), processors // 2)


def prompt_tiles(rows: int, spans: int) -> int:
    """The most tiles of up to `spans` longer spans with `rows` rows in all."""
    return min(spans, rows // 2) + rows // PROMPT_ROWS


def cut(starts: np.ndarray, lengths: np.ndarray, processors: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of decodes and of longer spans, int32 [tiles, COLUMNS] each. Spans have `lengths` rows
    from positions `starts` on, int64 [spans] each; the device has `processors` multiprocessors.

    Tiles with the longest context come first. Parts of a decode follow each other.
    """
    if (lengths == 1).all():  # the usual iteration
        owner = np.arange(lengths.size)
        return _decodes(owner, owner, starts, processors), _NO_TILES
    first_rows = np.cumsum(lengths) - lengths
    single, longer = np.flatnonzero(lengths == 1), np.flatnonzero(lengths > 1)
    decodes = _decodes(single, first_rows[single], starts[single], processors)
    return decodes, _prompts(longer, first_rows, starts, lengths)


def _decodes(
    spans: np.ndarray, rows: np.ndarray, starts: np.ndarray, processors: int
) -> np.ndarray:
    """Tiles of `spans` of one row each, at `rows` of the batch and positions `starts`."""
    parts = _parts(starts + 1, processors)
    # Parts of a span follow each other, since equal lengths keep their order.
    by_length = np.argsort(-(starts // parts), kind="stable")
    count = parts[by_length]
    owner = np.repeat(by_length, count)
    tiles = np.empty((owner.size, COLUMNS), dtype=np.int32)
    tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3] = rows[owner], 1, starts[owner], spans[owner]
    tiles[:, 4] = np.arange(owner.size) - np.repeat(np.cumsum(count) - count, count)
    tiles[:, 5] = parts[owner]
    return tiles


def _prompts(
    longer: np.ndarray, first_rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Tiles of the spans `longer` of a batch."""
    counts = -(-lengths[longer] // PROMPT_ROWS)
    owner = np.repeat(longer, counts)
    within = (np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)) * PROMPT_ROWS
    left = np.minimum(PROMPT_ROWS, lengths[owner] - within)
    none = np.zeros_like(owner)
    prompts = np.stack(
        [first_rows[owner] + within, left, starts[owner] + within, owner, none, none + 1], axis=1
    )
    by_position = np.argsort(-prompts[:, 2], kind="stable")
    return prompts[by_position].astype(np.int32)


def _parts(contexts: np.ndarray, processors: int) -> np.ndarray:
    """Into how many parts the keys of each decode are divided.

    A model has several KV heads, hence several programs a part: half as many parts as
    multiprocessors fill the device. From a quarter as many decodes on, only those longer than
    others are divided. The sum is at most the number of decodes plus `wanted`.
    """
    if not contexts.size:
        return contexts
    wanted = max(processors // 4, processors // 2 - contexts.size, 1)
    share = max(LEAST_SHARE, -(-int(contexts.sum()) // wanted))
    parts: np.ndarray = np.maximum(1, (contexts + share // 2) // share)
    return parts
