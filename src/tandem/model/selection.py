"""Two searches in a row of the vocabulary that avoid sorting it or summing it sequentially.

Both split the row into short pieces, decide which piece matters, and search only there. Invariant:
a row's result depends only on that row and the arguments.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SUM_PIECE = 128


def best_candidates(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` scores of each row and their columns, best first, equals by column.

    The `count` best are in the `count` pieces with the best maxima. Pieces are strided, so their
    maxima come from one vectorised pass. All columns after the last full piece are candidates.
    """
    rows, width = scores.shape
    if count == width:
        values, columns = scores.sort(dim=-1, descending=True, stable=True)
        return values, columns
    size = math.isqrt(width // max(count, 1))
    pieces = width // max(size, 1)
    if size < 2 or count >= pieces:
        return _ordered(*scores.topk(count, dim=-1))
    whole = size * pieces
    maxima = scores[:, :whole].view(rows, size, pieces).amax(dim=1)
    chosen = maxima.topk(count, dim=-1).indices
    steps = torch.arange(0, whole, pieces, device=scores.device)
    columns = (chosen[:, :, None] + steps).flatten(1)
    rest = torch.arange(whole, width, device=scores.device).expand(rows, -1)
    columns = torch.cat([columns, rest], dim=1)
    values, places = scores.gather(1, columns).topk(count, dim=-1)
    return _ordered(values, columns.gather(1, places))


def _ordered(values: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    columns, order = columns.sort(dim=-1)
    values, best = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, columns.gather(1, best)


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The column in whose interval each of `uniform` falls, int64 [rows].

    `weights` [rows, columns] are not negative and need not sum to 1. `uniform` float64 [rows] is in
    [0, 1). A weight of zero is never hit.
    """
    width = weights.shape[1]
    if width <= 2 * _SUM_PIECE:
        return _place(weights, uniform * weights.double().sum(dim=-1))[0]
    whole = width // _SUM_PIECE * _SUM_PIECE
    sums = weights[:, :whole].unflatten(1, (-1, _SUM_PIECE)).sum(dim=-1)
    if whole < width:
        sums = torch.cat([sums, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    piece, before, level = _place(sums, uniform * sums.double().sum(dim=-1))
    columns = piece[:, None] * _SUM_PIECE + torch.arange(_SUM_PIECE, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=width - 1))
    inside = inside.masked_fill(columns >= width, 0.0)
    place = piece * _SUM_PIECE + _place(inside, level - before)[0]
    return place.clamp_(max=width - 1)  # of a row that is not finite


def _place(weights: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First column whose running sum exceeds `level`, the sum before it, and the level used."""
    heights = weights.double().cumsum(dim=-1)
    total = heights[:, -1]
    # Rounding must not push a level past the last positive weight.
    level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))
    # A row that is not finite has no such column. The result must still be within the row.
    place = torch.searchsorted(heights, level[:, None], right=True).clamp_(max=weights.shape[1] - 1)
    before = (heights.gather(1, place) - weights.double().gather(1, place))[:, 0]
    return place[:, 0], before, level
