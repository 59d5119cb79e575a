"""Random numbers by counter: a pure function of (seed, choice, position), without generator state.

So an answer depends neither on the rest of the batch nor on preemption. The mixing function is
splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WORD = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(counters: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """One float64 in [0, 1) for each (seed, choice index, output position); any integers."""
    words = np.array([[part & _WORD for part in counter] for counter in counters], dtype=np.uint64)
    state = np.zeros(len(counters), dtype=np.uint64)
    for column in range(words.shape[1]):
        state = _mix((state ^ words[:, column]) + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
