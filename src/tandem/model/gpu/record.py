"""Copies the rows of a pass that are recorded to their places in an arena.

Which ones are recorded is a table on the device, so that a captured pass may record any.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tandem.model.gpu.launch import launch

_COLUMNS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _keep(rows, places, arena, row_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    """Columns `program_id(1)` of row `program_id(0)`."""
    row = tl.program_id(0)
    place = tl.load(places + row)
    if place >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        values = tl.load(rows + row.to(tl.int64) * row_stride + column, mask=inside)
        tl.store(arena + place * WIDTH + column, values, mask=inside)


def keep_rows(rows: Tensor, places: Tensor, arena: Tensor) -> None:
    """Write `rows` [rows, width] to the rows `places` int64 [rows] of `arena` [capacity, width],
    which is contiguous. A place of -1 is nowhere."""
    count, width = rows.shape
    assert rows.stride(1) == 1 and arena.is_contiguous() and arena.shape[1] == width
    grid = (count, triton.cdiv(width, _COLUMNS))
    launch(_keep, grid, rows, places, arena, rows.stride(0), WIDTH=width, COLUMNS=_COLUMNS)
