"""Rates that tests make up: coefficients of backward slices under their names, and guesses."""

from __future__ import annotations

from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.terms import SLICE_TERMS


def slice_rates(other: float = 1e-9, **terms: float) -> tuple[float, ...]:
    """Seconds in the order of `SLICE_TERMS`; `other` for those that are not named."""
    assert terms.keys() <= set(SLICE_TERMS), f"unknown: {terms.keys() - set(SLICE_TERMS)}"
    return tuple(terms.get(name, other) for name in SLICE_TERMS)


def guessed(**sizes: int) -> LatencyModel:
    sizes = {"weight_bytes": 10**9, "num_parameters": 5 * 10**8, "num_layers": 24} | sizes
    return LatencyModel(Rates.guess(**sizes))
