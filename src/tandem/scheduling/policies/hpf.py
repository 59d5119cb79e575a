"""Batches by priority point, the earliest first (the baseline HPF of RT-LM, V-A)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.estimators.batching import MEASURED
from tandem.scheduling import bounded_batch
from tandem.scheduling.bounded_batch import BoundedBatch, priority_point_s
from tandem.scheduling.view import Policy


@dataclass(frozen=True, slots=True)
class Options(bounded_batch.Options):
    """`phi` are seconds from arrival to the priority point, for each input token."""

    phi: float = field(default=0.08, metadata=MEASURED)

    def __post_init__(self) -> None:
        bounded_batch.Options.__post_init__(self)
        if self.phi <= 0.0:
            raise ValueError("phi must be above 0")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    phi = options.phi
    return BoundedBatch(options, lambda seq, _: seq.request.arrival_s + priority_point_s(seq, phi))
