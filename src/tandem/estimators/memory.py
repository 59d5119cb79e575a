"""How much KV memory requests will want, as mu + 2 sigma: those that come, by what others held
lately (Echo 5.3), and those that run, by how long their answers will be.

The cache counts the present exactly; this estimates the future. Knows numbers and times only.
Invariant: samples are older than the window only if there is a single one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from tandem.estimators.errors import RelativeErrors

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


# A struct, since one is made for every sequence while a request waits (docs/adr/0017).
class Growing(Struct, gc=False):
    """A sequence that holds memory for `now` tokens, and for one more with each iteration, until
    it has made one of `ends` more tokens, each with its probability. Without `ends` it stays as it
    is: nothing is known of it."""

    now: float
    ends: Sequence[tuple[float, float]] = ()

    @property
    def most(self) -> float:
        """Tokens at its latest end."""
        return self.now + (self.ends[-1][0] if self.ends else 0.0)


def peak_tokens(sequences: Sequence[Growing]) -> float:
    """The most tokens that these will almost never hold more of, at any time: the maximum of mu + 2
    sigma over the ends of sequences, since what is held only grows in between.

    Ends of different sequences are taken for independent.
    """
    ends = [
        (more, place, share) for place, each in enumerate(sequences) for more, share in each.ends
    ]
    ends.sort()
    lives = [1.0] * len(sequences)
    # Sums over sequences: that grow; tokens that all hold; p (1 - p) times 1, now and now squared.
    growing = float(sum([bool(each.ends) for each in sequences]))
    held = sum([each.now for each in sequences])
    spread = spread_now = spread_square = 0.0
    most, before_them = held, 0.0
    for more, place, share in ends:
        if more > before_them:  # those that end at the same time hold their last tokens together
            before_them = more
            variance = spread_square + more * (2.0 * spread_now + more * spread)
            most = max(most, held + growing * more + SIGMAS * math.sqrt(max(0.0, variance)))
        before, now = lives[place], sequences[place].now
        lives[place] = after = before - share
        growing -= share
        held -= share * now
        added = after * (1.0 - after) - before * (1.0 - before)
        spread += added
        spread_now += added * now
        spread_square += added * now * now
    return most
