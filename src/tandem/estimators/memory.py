"""How much KV memory requests will want, as mu + 2 sigma: those that come, by what others held
lately (Echo 5.3), and those that run, by how long their answers will be.

The cache counts the present exactly; this estimates the future. Knows numbers and times only.
Invariant: samples are older than the window only if there is a single one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tandem.estimators.errors import RelativeErrors

Table = NDArray[np.float64]

# How far above the mean; 98% of a normal distribution lies below.
SIGMAS = 2.0


class DemandWindow:
    """Demand over the last `window_s` seconds, with at most one sample every `interval_s` seconds.

    `errors` compares the mean with the next sample; samples of 0 blocks are left out.
    """

    def __init__(self, window_s: float = 3600.0, interval_s: float = 1.0) -> None:
        assert window_s > 0.0 and 0.0 < interval_s <= window_s
        self._window_s = window_s
        self._interval_s = interval_s
        self._samples: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._squares = 0
        self._due_s = -math.inf
        self.errors = RelativeErrors()

    def due(self, now: float) -> bool:
        """Whether another sample is due."""
        return now >= self._due_s

    def observe(self, now: float, blocks: int) -> None:
        """Add a sample: `blocks` are held at `now`. Ignored if no sample is due."""
        if not self.due(now):
            return
        if self._samples and blocks:
            self.errors.count(self._sum / len(self._samples), blocks)
        self._due_s = now + self._interval_s
        self._samples.append((now, blocks))
        self._sum += blocks
        self._squares += blocks * blocks
        while now - self._samples[0][0] > self._window_s:
            _, gone = self._samples.popleft()
            self._sum -= gone
            self._squares -= gone * gone

    @property
    def demand(self) -> float:
        """Blocks that requests will almost never exceed; 0 before the first sample."""
        count = len(self._samples)
        if not count:
            return 0.0
        mean = self._sum / count
        variance = max(0.0, self._squares / count - mean * mean)
        return mean + SIGMAS * math.sqrt(variance)


class Growing(Struct, gc=False):
    """A sequence with memory for `now` tokens that has made `made`: it takes one more with each
    iteration, until it ends with one of the lengths of `ends` (see `table_of`). Without `ends` it
    stays as it is: nothing is known of it."""

    now: float
    made: int = 0
    ends: Table | None = None

    @property
    def most(self) -> float:
        """Tokens at its latest end."""
        if self.ends is None:
            return self.now
        return self.now + max(1.0, float(self.ends[-1, 0]) - self.made)


def table_of(ends: Sequence[tuple[float, float]]) -> Table:
    """A row of each length at which an answer may end, in order, with its probability: both, and
    how the variance of whether the answer still grows changes there."""
    rows, alive = list[tuple[float, float, float]](), 1.0
    for length, share in ends:
        after = alive - share
        rows.append((length, share, after * (1.0 - after) - alive * (1.0 - alive)))
        alive = after
    return np.array(rows)


class Peak:
    """The most tokens that sequences will almost never hold more of, at any time: the maximum of
    mu + 2 sigma over the ends of sequences, since what they hold only grows in between.

    Ends of different sequences are taken for independent.
    """

    def __init__(self, sequences: Sequence[Growing] = ()) -> None:
        self._now, self._growing, self._rows = 0.0, 0, np.empty((0, 6))
        self.add(sequences)

    def add(self, sequences: Sequence[Growing]) -> None:
        """Count these from now on."""
        self._now += sum([each.now for each in sequences])
        self._growing += sum([each.ends is not None for each in sequences])
        self._rows = np.concatenate([self._rows, _changes(sequences)])

    def tokens_with(self, sequences: Sequence[Growing] = ()) -> float:
        """The peak with these, too."""
        now = self._now + sum([each.now for each in sequences])
        growing = self._growing + sum([each.ends is not None for each in sequences])
        rows = np.concatenate([self._rows, _changes(sequences)])
        if not len(rows):
            return now
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        more, sums = rows[:, 0], np.cumsum(rows, axis=0)
        # Those that end at the same time hold their last tokens together: the sums before them.
        places = np.flatnonzero(more[1:] > more[:-1])
        more, (_, ended, ended_now, spread, spread_now, spread_square) = (
            more[np.append(0, places + 1)],
            np.concatenate([np.zeros((1, 6)), sums[places]]).T,
        )
        mean = now - ended_now + (growing - ended) * more
        variance = spread_square + more * (2.0 * spread_now + more * spread)
        return max(now, float(np.max(mean + SIGMAS * np.sqrt(np.maximum(0.0, variance)))))


def _changes(sequences: Sequence[Growing]) -> Table:
    """A row of each end: tokens until then, and what changes there. That is the probability, and
    the change of the variance: times 1 and `now`, and the latter times its square, too."""
    tables = [(each, each.ends) for each in sequences if each.ends is not None]
    if not tables:
        return np.empty((0, 6))
    rows = np.concatenate([ends for _, ends in tables])
    counts = [len(ends) for _, ends in tables]
    now = np.repeat([each.now for each, _ in tables], counts)
    made = np.repeat([each.made for each, _ in tables], counts)
    more, share, added = np.maximum(1.0, rows[:, 0] - made), rows[:, 1], rows[:, 2]
    return np.stack([more, share, share * now, added, added * now, added * now * now], axis=1)
