"""The terms of the time of a pass or a backward slice, and how much of each is in its work.

`latency` has the formulas. Knows no seconds except those of the pass before. Invariant: no feature
is below 0.
"""

from __future__ import annotations

from tandem.estimators.work import BackwardWork, PassWork

# Terms of a pass, in the order of the coefficients. Tokens of context count in thousands, pairs in
# millions. `whole` and `whole_row` are the extra cost of keeping more of whole micro-batches, per
# pass and per row. `cold` is for caches that hold none of the weights.
FORWARD_TERMS = (
    "pass", "decode", "context", "longest", "mean", "row", "pairs", "draw", "scored",
    "recording", "recorded", "whole", "whole_row", "cold",
)  # fmt: skip
# Terms of a slice: once; per layer, and per row, pair and sequence of it; per layer whose forward
# is recomputed (its weights are read again), and per row and pair of it; per row of a layer of
# which only the rest is recomputed; for the first slice, and per row of it.
SLICE_TERMS = (
    "slice", "layer", "layer_row", "layer_pairs", "layer_sequence", "again", "again_row",
    "again_pairs", "rest_row", "first", "first_row",
)  # fmt: skip
# After a pass of this many seconds, half of the weights that fit the caches have left them.
_COLD_S = 0.02


def coldness(before_s: float) -> float:
    """Share of the weights that has left the caches after a pass of `before_s` seconds, 0 to 1."""
    return 1.0 - _COLD_S / (before_s + _COLD_S)


def features(
    work: PassWork, before_s: float, coefficients: tuple[float, ...], rho: float
) -> tuple[float, ...]:
    """Features of a pass by `FORWARD_TERMS`. `coefficients` tell which side takes longer."""
    mean = work.context / work.decodes / 1e3 if work.decodes else 0.0
    read = work.context + work.prefix
    decode = (1.0, work.decodes, read / 1e3, work.longest / 1e3, mean)
    return joined(decode, work, coldness(before_s), coefficients, rho)


def slice_features(work: BackwardWork, layers: int) -> tuple[float, ...]:
    """Features of a backward slice by `SLICE_TERMS`."""
    rows, pairs, first = layers * work.rows, layers * work.pairs / 1e6, 0.0 if work.begun else 1.0
    once = (1.0, layers, rows, pairs, layers * work.sequences)
    again = (layers * work.again, rows * work.again, pairs * work.again, rows * work.rest)
    return (*once, *again, first, first * work.rows)


def joined(
    decode: tuple[float, ...],
    work: PassWork,
    cold: float,
    coefficients: tuple[float, ...],
    rho: float,
) -> tuple[float, ...]:
    """Features of decode, prefill and the rest. The smaller of the first two counts rho times."""
    prefill: tuple[float, ...] = (work.rows, work.pairs / 1e6)
    records = 1.0 if work.recorded else 0.0
    whole = (1.0, work.recorded) if work.whole else (0.0, 0.0)
    recorded = (records, work.recorded, *whole)
    beside = (work.draws, work.scored, *recorded, cold)
    if rho == 1.0 or not work.rows:
        return (*decode, *prefill, *beside)
    first, last = len(decode), len(decode) + len(prefill)
    decode_s = sum([a * b for a, b in zip(coefficients[:first], decode, strict=True)])
    prefill_s = sum([a * b for a, b in zip(coefficients[first:last], prefill, strict=True)])
    if prefill_s > decode_s:
        decode = tuple([rho * feature for feature in decode])
    else:
        prefill = tuple([rho * feature for feature in prefill])
    return (*decode, *prefill, *beside)
