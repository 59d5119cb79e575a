"""Which of two candidates is better, and when the defaults change: written before the search.

Knows shares only. A candidate may not buy goodput with training: it must train as much as the
defaults, nearly. Invariant: equal shares give equal scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.constants.workloads import Share
from benchmarks.reporting.bootstrap import Interval, difference

# What training counts beside goodput, and how much less of it is still as much.
TRAINING_WEIGHT, LESS_TRAINING = 0.25, 0.01
# Held out: the least gain in score, and the most that the goodput of any one workload may fall.
LEAST_GAIN, MOST_LOSS = 0.02, 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of the best candidate on the held-out set: its gain in score over the defaults (paired over
    the runs), the change of training, and of goodput where it falls most."""

    gain: Interval
    training: float
    worst_workload: str
    worst_goodput: float

    @property
    def clear(self) -> bool:
        """Whether the defaults should change."""
        return (
            self.gain.value >= LEAST_GAIN
            and self.gain.low > 0.0
            and self.training >= -LESS_TRAINING
            and self.worst_goodput >= -MOST_LOSS
        )


def score(shares: Sequence[Share]) -> float:
    """The mean over runs of goodput and a quarter of training."""
    return fmean(_score(share) for share in shares)


def allowed(shares: Sequence[Share], base: Sequence[Share]) -> bool:
    """Whether as much is trained as under the defaults, up to a point."""
    trained, usual = (fmean(share.training for share in each) for each in (shares, base))
    return trained >= usual - LESS_TRAINING


def judge(held: Sequence[Share], base: Sequence[Share]) -> Verdict:
    """Of the held-out runs under the best candidate and under the defaults, in one order."""
    clusters = {
        str(place): [(_score(ours), _score(theirs))]
        for place, (ours, theirs) in enumerate(zip(held, base, strict=True))
    }
    ours, theirs = by_workload(held), by_workload(base)
    changes = {name: ours[name].goodput - theirs[name].goodput for name in ours}
    worst = min(changes, key=lambda name: changes[name])
    training = fmean(share.training for share in held) - fmean(share.training for share in base)
    return Verdict(difference(clusters), training, worst, changes[worst])


def by_workload(shares: Sequence[Share]) -> dict[str, Share]:
    """Means over the seeds of each workload."""
    found: dict[str, Share] = {}
    for name in dict.fromkeys(share.workload for share in shares):
        same = [share for share in shares if share.workload == name]
        goodput, training = (fmean(s.goodput for s in same), fmean(s.training for s in same))
        found[name] = Share(name, goodput, training)
    return found


def _score(share: Share) -> float:
    return share.goodput + TRAINING_WEIGHT * share.training
