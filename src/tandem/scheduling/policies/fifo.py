"""Batches in order of arrival (the baseline FIFO of RT-LM, V-A)."""

from __future__ import annotations

from tandem.scheduling.bounded_batch import BoundedBatch, Options
from tandem.scheduling.view import Policy


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return BoundedBatch(options, lambda seq, _: seq.request.arrival_s)
