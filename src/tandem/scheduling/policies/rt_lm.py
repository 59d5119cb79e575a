"""RT-LM's uncertainty-aware scheduling (section IV): short and urgent answers first, in batches of
answers that take about as long.

Uncertainty u is the predicted output length. Priority is equation 3, with u divided by the largest
u so far and both parts above zero: as printed, with alpha = 1 and u in tokens, the numerator is
negative and a short slack makes a request less urgent. Slack is the time that remains, as the text
says; as printed it would be that at the arrival. Offloading (IV-D) is `engine/placement.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.sequence import Sequence
from tandem.estimators.batching import MEASURED
from tandem.scheduling import bounded_batch
from tandem.scheduling.bounded_batch import (
    BoundedBatch,
    Gathering,
    Rank,
    expected_tokens,
    priority_point_s,
)
from tandem.scheduling.view import Policy

# What the numerator, and the slack in seconds, count at least.
_LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class Options(bounded_batch.Options):
    """The paper's constants (V-A; `phi` and `eta` are those of DialoGPT); `batch` is its C. Those
    of a profile stand for options that are not given."""

    alpha: float = field(default=1.0, metadata=MEASURED)  # weight of the uncertainty
    # Seconds from arrival to the priority point, for each input token.
    phi: float = field(default=0.08, metadata=MEASURED)
    eta: float = field(default=0.05, metadata=MEASURED)  # seconds of an output token
    # b: so many times `batch` gather before some of them start.
    gather: float = field(default=1.8, metadata=MEASURED)
    ratio: float = 1.5  # lambda: between one answer's length and the next one's in a batch
    consolidate: bool = True  # False: the first `batch` requests by priority
    slack: bool = False  # equation 2, the slack alone
    literal: bool = False  # equation 3 as it is printed

    def __post_init__(self) -> None:
        bounded_batch.Options.__post_init__(self)
        if self.alpha < 0.0 or min(self.phi, self.eta) <= 0.0:
            raise ValueError("alpha must be at least 0, phi and eta above 0")
        if self.slack and self.literal:
            raise ValueError("slack is equation 2 and literal is equation 3: choose one")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    gathering = Gathering(options.gather, options.ratio) if options.consolidate else None
    return BoundedBatch(options, rank_of(options), gathering)


def rank_of(options: Options) -> Rank:
    """Orders requests by equation 2 or 3."""
    if options.slack:
        return lambda seq, _: _slack_s(options, seq)
    if options.literal:
        return lambda seq, _: -_literal(options, seq)
    return _Weighted(options)


class _Weighted:
    """Minus equation 3. Keeps the largest u so far, the paper's training maximum.

    `BoundedBatch` ranks all that wait before it sorts, so a sort has one maximum.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._most = 1.0

    def __call__(self, seq: Sequence, now: float) -> float:
        tokens = expected_tokens(seq)
        self._most = max(self._most, tokens)
        short = max(_LEAST, 1.0 - self._options.alpha * tokens / self._most)
        left_s = _slack_s(self._options, seq) - (now - seq.request.arrival_s)
        return -short / max(_LEAST, left_s)


def _slack_s(options: Options, seq: Sequence) -> float:
    """At the arrival."""
    return priority_point_s(seq, options.phi) - options.eta * expected_tokens(seq)


def _literal(options: Options, seq: Sequence) -> float:
    slack_s = _slack_s(options, seq)
    return (1.0 - options.alpha * expected_tokens(seq)) / (slack_s or _LEAST)
